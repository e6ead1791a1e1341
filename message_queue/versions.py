"""Which weights were published, how many optimizer updates each holds, and which of them the replicas serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from message_queue.contract import QueueError


class PublishedVersions:
    """Versions go up, updates do not go back.

    Args:
        updates: `param_version` -> optimizer updates, of what was published before. served: of them, by every replica.
    """

    def __init__(self, updates: Mapping[int, int], *, served: int) -> None:
        self._updates = dict(updates)
        self._newest = max(self._updates)
        self._served = served

    @property
    def updates(self) -> Mapping[int, int]:
        """`param_version` -> optimizer updates it holds."""
        return self._updates

    @property
    def served(self) -> int:
        """Newest version that every replica serves."""
        return self._served

    @property
    def served_update(self) -> int:
        """Optimizer updates held by `served`."""
        return self._updates[self._served]

    def publish(self, version: int, *, update: int) -> None:
        """Add a version.

        Raises:
            QueueError: the version or its update goes back.
        """
        if version <= self._newest or update < self._updates[self._newest]:
            raise QueueError(
                f"published version {version} with {update} updates after version {self._newest} with "
                f"{self._updates[self._newest]}; versions go up, updates do not go back"
            )
        self._updates[version] = update
        self._newest = version

    def load(self, version: int) -> None:
        """Every replica serves `version`.

        Raises:
            QueueError: it was never published, or is older than what was served before.
        """
        if version not in self._updates or version < self._served:
            raise QueueError(
                f"loaded version {version} after version {self._served}; "
                f"version {self._newest} is the newest that was published"
            )
        self._served = version


def known_updates(
    published: Mapping[int, int], *, admitted: Iterable[tuple[int, int]], used: Iterable[int]
) -> dict[int, int]:
    """Optimizer updates of every version, where what was written of some of them is lost.

    Such a version holds at least as many as the weights before it, so what it sampled is never taken for newer than it
    is, and at most as many as those after it.

    Args:
        published: `param_version` -> optimizer updates, of the versions that are known.
        admitted: (version, updates) that groups were admitted on. used: versions that sampled a token.
    """
    pairs = [*published.items(), *admitted]
    updates = dict(published)
    for version in {version for version, _ in pairs} | set(used):
        if version not in published:
            least = max((update for other, update in pairs if other <= version), default=0)
            updates[version] = min([least, *(update for other, update in published.items() if other > version)])
    return updates
