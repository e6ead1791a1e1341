"""Training prompts in a fixed order. The state of a source is a position in that order, so a run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_loop.loop import Message, Prompt
from async_rl.files.atomic_dir import whole_file
from async_rl.files.jsonl import read_lines
from async_rl.files.validation import explain
from async_rl.rollout.data import Epochs
from async_rl.rollout.task import Task

PromptOrder = Callable[[int], Prompt]
"""An endless, deterministic sequence of prompts: index, from 0 -> prompt."""


class FailedPrompts:
    """Prompts of the groups whose consecutive failures stopped a run, stored in a file for the next start.

    Args:
        path: file of their indices. It exists until all its prompts were readmitted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._prompts = set[int](json.loads(path.read_text())) if path.exists() else set[int]()

    @property
    def prompts(self) -> Sequence[int]:
        """Indices of the prompts, ascending."""
        return sorted(self._prompts)

    def add(self, prompts: Iterable[int]) -> None:
        """Store more indices."""
        self._replace(self._prompts.union(prompts))

    def discard(self, prompts: Iterable[int]) -> None:
        """Remove indices; the next start does not readmit them."""
        self._replace(self._prompts.difference(prompts))

    def _replace(self, prompts: set[int]) -> None:
        if prompts == self._prompts:
            return
        self._prompts = prompts
        if not prompts:
            self._path.unlink(missing_ok=True)
            return
        with whole_file(self._path) as file:
            file.write_text(json.dumps(self.prompts) + "\n")


class PromptSource:
    """Yields prompts in order, starting with the prompts of unfinished groups of an earlier run.

    With cursor=7 and unfinished={3, 5} the prompts are 3, 5, 7, 8, ...

    Args:
        order: the endless order of prompts.
        cursor: first index that was never admitted.
        unfinished: admitted indices whose groups were neither trained nor dropped by an earlier run.
        failed: indices below `cursor` whose groups failed until an earlier run stopped; they are readmitted.
            With None, `keep_failed` does nothing.
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
        """Indices of an earlier run that still have to be readmitted, ascending."""
        return tuple(self._unfinished)

    @property
    def cursor(self) -> int:
        """First index that was never admitted."""
        return self._cursor

    def at(self, index: int) -> Prompt:
        """Prompt `index` of the order."""
        return self._order(index)

    def current(self) -> Prompt:
        """The prompt to admit next."""
        return self._order(self._unfinished[0] if self._unfinished else self._cursor)

    def advance(self) -> None:
        """Move to the next prompt, after the current one was admitted."""
        if not self._unfinished:
            self._cursor += 1
            return
        admitted = self._unfinished.pop(0)
        if self._failed is not None:
            self._failed.discard([admitted])

    def keep_failed(self, indices: Iterable[int]) -> None:
        """Store prompts whose failed groups stop the run, so that the next start readmits them."""
        if self._failed is not None:
            self._failed.add(indices)


class _MessageSchema(BaseModel):
    """A message in a prompt file. Extra keys are refused because they would have no effect."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Annotated[str, Field(min_length=1)]
    """Role in the chat template, such as `user`."""
    content: str
    """Text of the message."""


class _PromptSchema(BaseModel):
    """A line of a prompt file."""

    model_config = ConfigDict(extra="forbid", strict=True)
    messages: Annotated[list[_MessageSchema], Field(min_length=1)]
    """The conversation before the first model call."""
    target: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Input of the reward, such as the expected answer; the task defines the keys."""


def prompt_order(task: Task, *, prompt_file: Path | None, seed: int) -> PromptOrder:
    """The prompts of `prompt_file` (see `read_order`), or of the task if there is no file."""
    if prompt_file is None:
        return task.train_prompt

    def check(prompt: Prompt) -> None:
        task.check_prompt(prompt)
        task.check_length(prompt)

    return read_order(prompt_file, seed=seed, check=check)


def read_order(path: Path, *, seed: int, check: Callable[[Prompt], None] = lambda _prompt: None) -> PromptOrder:
    """Prompts of JSON lines `{"messages": [{"role": ..., "content": ...}], "target": {...}}`; see `Epochs`.

    Args:
        path: file of JSON lines.
        seed: number that fixes the shuffle of each epoch.
        check: raises ValueError for a prompt that the task cannot use; called for every prompt of the file.

    Raises:
        ValueError: the file cannot be read or is empty, a line does not match the schema, or `check` refuses a prompt.
            The message names file, line and key.
    """
    entries = Epochs(_read_entries(path, check), seed=seed)
    return lambda index: replace(entries[index], index=index)


def _read_entries(path: Path, check: Callable[[Prompt], None]) -> Sequence[Prompt]:
    try:
        lines = read_lines(path)
    except OSError as error:
        raise ValueError(f"task.prompt_file is {path}, which cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"task.prompt_file is {path}, which is no text in UTF-8; write JSON lines, or give a file of another kind "
            "to Task(prompts=...)"
        ) from error
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
    """The prompt of a line; ValueError names the key that does not match the schema."""
    try:
        parsed = _PromptSchema.model_validate_json(line)
    except ValidationError as error:
        raise ValueError(
            f"{explain(error.errors()[0])}; "
            'write {"messages": [{"role": "user", "content": "..."}], "target": {}} on one line'
        ) from error
    messages = tuple(Message(role=message.role, content=message.content) for message in parsed.messages)
    return Prompt(index=index, messages=messages, target=parsed.target)
