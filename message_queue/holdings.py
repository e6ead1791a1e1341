"""Which groups the queue holds and in which state. No waiting and no policy; the caller keeps transitions legal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

from message_queue.contract import Admission, QueuedGroup
from message_queue.staleness import GroupCounts

G = TypeVar("G", bound=QueuedGroup)


class Holdings(Generic[G]):
    """open -> ready -> taken -> gone, or gone from any state. Counts by admitted update are kept up to date."""

    def __init__(self) -> None:
        self.open: dict[int, Admission] = {}
        self.ready: dict[int, G] = {}
        self.taken: dict[int, int] = {}
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

    def start(self, admission: Admission) -> None:
        """A group is admitted: open."""
        self.open[admission.group] = self._admissions[admission.group] = admission
        self._outstanding[admission.admitted_update] += 1

    def deliver(self, group: G) -> None:
        """open -> ready."""
        del self.open[group.group]
        self.ready[group.group] = group
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
        del self._admissions[group]

    def _leave_ready(self, group: int) -> None:
        update = self.ready.pop(group).admitted_update
        self._decrement(self._ready_updates, update)
        self._decrement(self._outstanding, update)

    @staticmethod
    def _decrement(counts: Counter[int], update: int) -> None:
        counts[update] -= 1
        if not counts[update]:
            del counts[update]
