"""Which groups the queue holds and in which state. No waiting and no policy; the caller keeps transitions legal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

from message_queue.contract import Admission, QueuedGroup
from message_queue.staleness import GroupCounts

G = TypeVar("G", bound=QueuedGroup)


class Holdings(Generic[G]):
    """open -> ready -> taken -> gone, or gone from any state. Counts are kept up to date.

    num_tokens: sampled tokens of the groups that are ready or taken.
    """

    def __init__(self) -> None:
        self.open: dict[int, Admission] = {}
        self.ready: dict[int, G] = {}
        self.taken: dict[int, int] = {}
        self.num_tokens = 0
        self._tokens: dict[int, int] = {}
        self._newest: dict[int, int | None] = {}
        self._admissions: dict[int, Admission] = {}
        self._outstanding: Counter[int] = Counter()
        self._ready_updates: Counter[int] = Counter()

    @property
    def outstanding_updates(self) -> GroupCounts:
        """Admitted update -> groups that are open or ready."""
        return self._outstanding

    @property
    def ready_updates(self) -> GroupCounts:
        """Admitted update -> groups that are ready."""
        return self._ready_updates

    @property
    def live(self) -> list[int]:
        """Groups in any state, from the states themselves."""
        return [*self.open, *self.ready, *self.taken]

    def unfinished(self) -> tuple[Admission, ...]:
        """Admissions of all live groups, by id."""
        return tuple(self._admissions[group] for group in sorted(self._admissions))

    def prompt(self, group: int) -> int:
        """Of a live group."""
        return self._admissions[group].prompt

    def newest_update(self, group: int) -> int | None:
        """Of the newest weights that sampled a token of a ready group; None where nothing was sampled."""
        return self._newest[group]

    def start(self, admission: Admission) -> None:
        """A group is admitted: open."""
        self.open[admission.group] = self._admissions[admission.group] = admission
        self._outstanding[admission.admitted_update] += 1

    def deliver(self, group: G, *, newest_update: int | None) -> None:
        """open -> ready."""
        del self.open[group.group]
        self.ready[group.group] = group
        self._newest[group.group] = newest_update
        self._tokens[group.group] = group.num_tokens
        self.num_tokens += self._tokens[group.group]
        self._ready_updates[group.admitted_update] += 1

    def take(self, groups: Iterable[G], *, update: int) -> None:
        """ready -> taken, to be trained at `update`."""
        for group in groups:
            self._leave_ready(group.group)
            self.taken[group.group] = update

    def end(self, group: int) -> None:
        """Any state -> gone."""
        if group in self.open:
            self._decrement(self._outstanding, self.open.pop(group).admitted_update)
        elif group in self.ready:
            self._leave_ready(group)
        else:
            del self.taken[group]
        self.num_tokens -= self._tokens.pop(group, 0)
        del self._admissions[group]

    def _leave_ready(self, group: int) -> None:
        update = self.ready.pop(group).admitted_update
        del self._newest[group]
        self._decrement(self._ready_updates, update)
        self._decrement(self._outstanding, update)

    @staticmethod
    def _decrement(counts: Counter[int], update: int) -> None:
        counts[update] -= 1
        if not counts[update]:
            del counts[update]
