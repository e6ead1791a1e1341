"""Which prompt starts next, under which id: prompts that are admitted again come before new ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from message_queue.contract import Admission


class Admissions:
    """Hands out ids, which are unique and never reused.

    Args:
        recycles: prompt -> times that it was to be admitted again, for prompts that are not done.
    """

    def __init__(self, *, next_group: int, recycles: Mapping[int, int] | None = None) -> None:
        self.next_group = next_group
        self._waiting = deque[int]()
        self._recycles = dict(recycles or {})
        self._unheard: dict[int, Admission] = {}  # by prompt

    @property
    def waiting(self) -> tuple[int, ...]:
        """Prompts to admit again, in order."""
        return tuple(self._waiting)

    @property
    def recycles(self) -> dict[int, int]:
        """prompt -> times that it was to be admitted again."""
        return dict(self._recycles)

    def times(self, prompt: int) -> int:
        """How often a prompt was to be admitted again."""
        return self._recycles.get(prompt, 0)

    def unheard(self, prompt: int) -> Admission | None:
        """The admission nobody heard of that a caller with `prompt` is given: of it, or of one admitted again."""
        if prompt in self._unheard:
            return self._unheard[prompt]
        return next((a for p, a in self._unheard.items() if self._recycles.get(p)), None)

    def heard(self, admission: Admission) -> None:
        """Somebody is told of it."""
        self._unheard.pop(admission.prompt, None)

    def take_back(self, admission: Admission) -> None:
        """Nobody heard of it."""
        self._unheard[admission.prompt] = admission

    def begin(self, prompt: int, *, version: int, update: int) -> Admission:
        """The next group: of a prompt that waits to be admitted again, else of `prompt`."""
        admission = Admission(
            group=self.next_group,
            prompt=self._waiting.popleft() if self._waiting else prompt,
            admitted_version=version,
            admitted_update=update,
        )
        self.next_group += 1
        return admission

    def again(self, prompt: int) -> None:
        """The group of a prompt was given up, and the prompt is to be admitted again."""
        self._unheard.pop(prompt, None)
        self._recycles[prompt] = self.times(prompt) + 1
        self._waiting.append(prompt)

    def done(self, prompt: int) -> None:
        """The group of a prompt was trained or dropped."""
        self._unheard.pop(prompt, None)
        self._recycles.pop(prompt, None)
