"""Whether prompts whose groups expired are admitted again: each once, in their order, before any new one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from message_queue.contract import Admission


def is_recycled(record: Mapping[str, Any]) -> bool:
    """Whether a dropped group says that its prompt is admitted again."""
    return (record["reason"] or "").startswith("recycled")


class Recycles:
    """Judges the admissions of one start.

    Args:
        before: prompt -> times that it was to be admitted again, by the checkpoint.
        require: called with (invariant, whether it holds, text, values).
    """

    def __init__(self, before: Mapping[int, int], *, max_recycles: int, require: Callable[..., None]) -> None:
        self._times = dict(before)
        self._max = max_recycles
        self._require = require
        self._known: set[int] = set()
        self._waiting: deque[int] = deque()
        self._new: deque[int] = deque()  # found at this look: admissions of the same look may be older

    def ended(self, records: Sequence[Mapping[str, Any]], *, prompt_of: Callable[[int], int]) -> None:
        """Groups ended, in this order."""
        for record in records:
            if record["group"] in self._known or record["outcome"] != "dropped":
                continue
            self._known.add(record["group"])
            if is_recycled(record):
                prompt = prompt_of(record["group"])
                self._times[prompt] = self._times.get(prompt, 0) + 1
                bounded = self._times[prompt] <= self._max
                self._require("exactly once", bounded, "prompt {} is recycled {} times", prompt, self._times[prompt])
                self._new.append(prompt)

    def admitted(self, admission: Admission) -> bool:
        """Whether a group is of a prompt that is admitted again."""
        if self._waiting:
            first = self._waiting.popleft()
            self._require("exactly once", admission.prompt == first, "{}; prompt {} waits", admission, first)
            return True
        if self._new and admission.prompt == self._new[0]:
            self._new.popleft()
            return True
        return False

    def seen(self) -> None:
        """All admissions so far were judged."""
        self._waiting += self._new
        self._new.clear()

    def gave_up(self, prompt: int) -> None:
        """A prompt was dropped for its age."""
        times = self._times.get(prompt, 0)
        self._require("exactly once", times == self._max, "prompt {} is given up after {} recycles", prompt, times)
