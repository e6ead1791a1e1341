"""Whether prompts whose groups expired are admitted again: each once, in their order, before any new one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from async_rl.simulate.restarts import Reopened, is_recycled
from async_rl.simulate.violations import require
from message_queue.contract import Admission
from message_queue.recovery import HOPELESS


class Recycles:
    """Judges the admissions of a run over all its restarts; after one, the driver asks for what waits.

    Args:
        recycling: whether the run has the policy.
    """

    def __init__(self, *, recycling: bool, max_recycles: int) -> None:
        self._recycling = recycling
        self._max = max_recycles
        self._before: dict[int, int] = {}  # prompt -> times, by groups that nobody knows any more
        self._prompts: dict[int, int] = {}  # of groups that were recycled
        self._known: dict[int, str] = {}  # reasons; an end that was not recorded may be another one later
        self._without_place: set[int] = set()  # prompts that started again for that, which no limit forbids
        self._waiting: deque[int] = deque()
        self._new: deque[int] = deque()  # found at this look: admissions of the same look may be older

    @property
    def prompts(self) -> Collection[int]:
        """Prompts that were to be admitted again, some time."""
        return {*self._before, *self._prompts.values()}

    def reopened(self, found: Reopened) -> None:
        """The run goes on from a checkpoint and a journal; groups that were given up as it was opened ended before."""
        self._waiting.clear()
        self._new.clear()
        if found.restored.began:
            self._before = dict(found.state.queue.recycles)
            self._prompts = {}
        ended = set(range(found.restored.next_group)).difference(found.live)
        self._prompts = {group: prompt for group, prompt in self._prompts.items() if group in ended}
        self._known = {group: reason for group, reason in self._known.items() if group in ended}

    def unseen(self, prompts: Mapping[int, int]) -> None:
        """Groups -> prompts that were recycled as the journal was opened, maybe by an attempt that was cut off."""
        self._known = dict.fromkeys(prompts, "") | self._known
        self._prompts |= prompts

    def ended(self, records: Sequence[Mapping[str, Any]], *, prompt_of: Callable[[int], int]) -> None:
        """Groups ended, in this order."""
        for record in records:
            if record.get("group") is None or record["outcome"] != "dropped":
                continue
            if self._known.get(record["group"]) == record["reason"]:
                continue
            self._known[record["group"]] = record["reason"]
            expired = record["reason"].startswith("expired") and self._recycling
            if not (is_recycled(record) or expired):
                continue
            prompt = prompt_of(record["group"])
            if record["reason"] == HOPELESS:
                self._without_place.add(prompt)
            if expired:
                times = self._times(prompt)
                allowed = times == self._max or (times > self._max and prompt in self._without_place)
                require("exactly once", allowed, "prompt {} given up after {} times", prompt, times)
                continue
            self._prompts[record["group"]] = prompt
            self._new.append(prompt)
            times = self._times(prompt)
            allowed = times <= self._max or record["reason"] == HOPELESS
            require("exactly once", allowed, "prompt {} is recycled {} times", prompt, times)

    def admitted(self, admission: Admission) -> bool:
        """Whether a group is of a prompt that is admitted again."""
        if self._waiting:
            first = self._waiting.popleft()
            require("exactly once", admission.prompt == first, "{}; prompt {} waits", admission, first)
            return True
        if self._new and admission.prompt == self._new[0]:
            self._new.popleft()
            return True
        return False

    def seen(self) -> None:
        """All admissions so far were judged."""
        self._waiting += self._new
        self._new.clear()

    def _times(self, prompt: int) -> int:
        return self._before.get(prompt, 0) + list(self._prompts.values()).count(prompt)
