"""Where training prompts come from. A source is a position in a fixed order, so a run continues where it stopped."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_loop.loop import Message, Prompt
from async_rl.data.task import Task
from async_rl.jsonl import read_lines
from async_rl.validation import explain


class PromptOrder(Protocol):
    """Endless, deterministic: index -> Prompt."""

    def train_prompt(self, index: int) -> Prompt: ...


class FailedPrompts:
    """Prompts whose groups failed one after the other until the run stopped; a file keeps them for the next start.

    Args:
        path: of the file. It is there as long as one of them is not admitted again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._prompts = set[int](json.loads(path.read_text())) if path.exists() else set[int]()

    @property
    def prompts(self) -> Sequence[int]:
        """Their indices, in order."""
        return sorted(self._prompts)

    def add(self, prompts: Iterable[int]) -> None:
        """Keep more of them."""
        self._replace(self._prompts.union(prompts))

    def discard(self, prompts: Iterable[int]) -> None:
        """Forget those that are kept; another start does not admit them."""
        self._replace(self._prompts.difference(prompts))

    def _replace(self, prompts: set[int]) -> None:
        if prompts == self._prompts:
            return
        self._prompts = prompts
        if not prompts:
            self._path.unlink(missing_ok=True)
            return
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.prompts) + "\n")
        partial.replace(self._path)


class PromptSource:
    """Hands out prompts in order, those of a stopped run's unfinished groups first.

    Args:
        order: the endless order of prompts.
        cursor: next index that was never handed out.
        unfinished: indices handed out by an earlier run whose groups were neither trained nor dropped.
        failed: indices below `cursor` whose groups failed until an earlier run stopped; None keeps none.
    """

    def __init__(
        self,
        order: PromptOrder,
        *,
        cursor: int = 0,
        unfinished: Iterable[int] = (),
        failed: FailedPrompts | None = None,
    ) -> None:
        self._order = order
        self._cursor = cursor
        self._failed = failed
        self._unfinished = sorted({*unfinished, *(failed.prompts if failed is not None else ())})

    @property
    def unfinished(self) -> Sequence[int]:
        """Indices of an earlier run that are still to be admitted."""
        return tuple(self._unfinished)

    @property
    def cursor(self) -> int:
        """First index that was never handed out."""
        return self._cursor

    def at(self, index: int) -> Prompt:
        """Prompt `index` of the order."""
        return self._order.train_prompt(index)

    def current(self) -> Prompt:
        """The prompt to admit next."""
        return self._order.train_prompt(self._unfinished[0] if self._unfinished else self._cursor)

    def advance(self) -> None:
        """The current prompt was admitted; go on to the one after it."""
        if not self._unfinished:
            self._cursor += 1
            return
        admitted = self._unfinished.pop(0)
        if self._failed is not None:
            self._failed.discard([admitted])

    def keep_failed(self, indices: Iterable[int]) -> None:
        """The run stops because the groups of these failed: the next start admits them again."""
        if self._failed is not None:
            self._failed.add(indices)


class _MessageSchema(BaseModel):
    """A message of a prompt file. Extra keys are refused, because nothing would read them."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Annotated[str, Field(min_length=1)]
    content: str


class _PromptSchema(BaseModel):
    """A line of a prompt file."""

    model_config = ConfigDict(extra="forbid", strict=True)
    messages: Annotated[list[_MessageSchema], Field(min_length=1)]
    target: dict[str, Any] = Field(default_factory=dict[str, Any])


class PromptFile:
    """JSON lines `{"messages": [{"role": ..., "content": ...}], "target": {...}}`, shuffled again in each epoch.

    Args:
        check: raises ValueError for a prompt that the task cannot use; called for every prompt of the file.

    Raises:
        ValueError: the file cannot be read or is empty, a line does not match the schema, or `check` refuses a prompt;
            names file, line and key.
    """

    def __init__(self, path: Path, *, seed: int, check: Callable[[Prompt], None] = lambda _prompt: None) -> None:
        self._seed = seed
        self._entries = _read_entries(path, check)
        self._epoch = -1
        self._order: list[int] = []

    def train_prompt(self, index: int) -> Prompt:
        """Prompt `index`; epoch e is a permutation of the file drawn from (seed, e)."""
        epoch, at = divmod(index, len(self._entries))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._entries)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return replace(self._entries[self._order[at]], index=index)


def prompt_order(task: Task, *, prompt_file: Path | None, seed: int) -> PromptOrder:
    """The prompt file if one is given, else the task's own stream."""
    return task if prompt_file is None else PromptFile(prompt_file, seed=seed, check=task.check_prompt)


def _read_entries(path: Path, check: Callable[[Prompt], None]) -> Sequence[Prompt]:
    try:
        lines = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"task.prompt_file is {path}, which cannot be read: {error}") from error
    entries: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = _parse_entry(line, index=len(entries))
            check(entry)
        except ValueError as error:
            raise ValueError(f"task.prompt_file is {path}, line {number}: {error}") from error
        entries.append(entry)
    if not entries:
        raise ValueError(f"task.prompt_file is {path}, which has no prompts")
    return entries


def _parse_entry(line: str, *, index: int) -> Prompt:
    """Raises ValueError: the line is not JSON or does not match the schema; names the key."""
    try:
        parsed = _PromptSchema.model_validate_json(line)
    except ValidationError as error:
        raise ValueError(
            f"{explain(error.errors()[0])}; "
            'write {"messages": [{"role": "user", "content": "..."}], "target": {}} on one line'
        ) from error
    messages = tuple(Message(role=message.role, content=message.content) for message in parsed.messages)
    return Prompt(index=index, messages=messages, target=parsed.target)
