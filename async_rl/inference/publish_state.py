"""Phases of the replicas during a publish. Pure: the publisher reports events, and asks which replicas to pause next.

    serving --> staging --> staged --> loading --> serving
       \\___________\\__________\\__________\\____--> fenced

A replica serves the version before while it is staging or staged, and is paused while it is loading. No replica is
paused before each has the version or is fenced. Three replicas; c does not get version 7, and at most one is paused
at a time:

    event                    serving 6    staging    staged    loading    serving 7    fenced
    PublishState(7)                       a b c
    staged(a), staged(b)                  c          a b
    fence(c)                                         a b                               c
    next_loads() gives a                             b         a                       c
    loaded(a)                                        b                    a            c
    next_loads() gives b                                       b          a            c
    loaded(b)                                                             a b          c

A replica that is started during the run joins after the publish, by `compare` of its parameters with the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from message_queue.errors import EngineError
from message_queue.tokens import WeightVersion


class Phase(Enum):
    """Place of a replica in a publish."""

    SERVING = "serving"
    STAGING = "staging"
    STAGED = "staged"
    LOADING = "loading"
    FENCED = "fenced"


class PublishState:
    """One publish.

    Args:
        weights: the version that is published.
        replicas: names of the replicas that serve.
        max_paused: most replicas in `LOADING`; None for all.
        before: the publish before this one; None for the first.

    Raises:
        ValueError: the version is older than the one before, or the same with other weights.
    """

    def __init__(
        self,
        weights: WeightVersion,
        replicas: Iterable[str],
        *,
        max_paused: int | None = None,
        before: PublishState | None = None,
    ) -> None:
        if before is not None and weights.version <= before.weights.version and weights != before.weights:
            raise ValueError(f"{weights} is published after {before.weights}; a version has one set of weights")
        self.weights = weights
        self._phases = dict.fromkeys(replicas, Phase.STAGING)
        self._max_paused = max_paused
        self._cancelled = False
        self._first_load: tuple[str, str] | None = None  # replica and checksum of its parameters

    def phase(self, replica: str) -> Phase:
        """Phase of a replica of this publish."""
        return self._phases[replica]

    @property
    def paused(self) -> frozenset[str]:
        """Replicas that load the version."""
        return frozenset(replica for replica, phase in self._phases.items() if phase is Phase.LOADING)

    def staged(self, replica: str) -> None:
        """A replica has what it needs before its pause."""
        self._enter(replica, Phase.SERVING if self._cancelled else Phase.STAGED, Phase.STAGING)

    def next_loads(self) -> list[str]:
        """Replicas that are paused from now on, in order."""
        phases = self._phases
        if Phase.STAGING in phases.values():
            return []
        waiting = [replica for replica, phase in phases.items() if phase is Phase.STAGED]
        chosen = waiting if self._max_paused is None else waiting[: self._max_paused - len(self.paused)]
        phases.update(dict.fromkeys(chosen, Phase.LOADING))
        return chosen

    def compare(self, replica: str, checksum: str) -> None:
        """Compare the parameters that a replica has loaded with those of the first one, before it resumes.

        Raises:
            EngineError: they differ, although all replicas have the same configuration.
        """
        first, expected = self._first_load = self._first_load or (replica, checksum)
        if checksum != expected:
            raise EngineError(
                f"{replica} has parameters with checksum {checksum} for version {self.weights.version}, but {first} "
                f"has {expected}; one replica does not serve the published weights"
            )

    def loaded(self, replica: str) -> None:
        """A replica serves the version."""
        self._enter(replica, Phase.SERVING, Phase.LOADING)

    def fence(self, replica: str) -> None:
        """A replica died, was too slow, or refused the version: it serves nothing any more."""
        self._enter(replica, Phase.FENCED, *Phase)

    def cancel(self) -> None:
        """Pause no further replica; those that are paused finish."""
        self._cancelled = True
        for replica, phase in self._phases.items():
            if phase is Phase.STAGED:
                self._phases[replica] = Phase.SERVING

    def _enter(self, replica: str, phase: Phase, *allowed: Phase) -> None:
        if self._phases[replica] not in allowed:
            raise ValueError(f"{replica} is {self._phases[replica].value}; it cannot become {phase.value}")
        self._phases[replica] = phase
