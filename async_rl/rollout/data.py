"""Prompts from a list, a generator, a file or a dataset, in an order that a restarted run repeats."""

from __future__ import annotations

import inspect
import json
import random
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from agent_loop.loop import Message, Prompt
from agent_loop.programs.conversation import EndpointError
from agent_loop.programs.endpoint.body import Fields
from agent_loop.programs.endpoint.chat_completions import read_message
from agent_loop.text import safe_text
from agent_loop.user_errors import describe_error
from async_rl.files.jsonl import read_lines

Source = Any
"""A sequence of rows, or a table of pandas, polars or pyarrow; a function of a seed (or of nothing) that yields rows;
the path of a .jsonl, .json or .parquet file or of a folder that `datasets` saved; or a dataset's name at the Hugging
Face hub, as NAME or NAME:SPLIT.

A row is a text, a `Prompt`, or a mapping with `prompt` (a text) or `messages` (a list in OpenAI's format). Its other
keys are the columns that rewards and templates use.
"""
GIVE = "give a list of rows, a table, a split of a dataset, a path, or a function that yields rows (not its generator)"
CHECKED = 100_000  # rows that are checked before the start


class PromptFormat:
    """Makes prompts of rows.

    Args:
        template: text with {column} places, the user's message; None takes the column `prompt`.
        system: first message of each prompt; None for none.
        teacher: column with the name of the teacher, "" for none; None for no such column.
    """

    def __init__(self, *, template: str | None = None, system: str | None = None, teacher: str | None = None) -> None:
        self._template = template
        self._system = system
        self._teacher = teacher

    def prompt(self, row: Any, *, index: int) -> Prompt:
        """The prompt of a row.

        Raises:
            ValueError: a column is missing or has another type; names it.
        """
        if isinstance(row, Prompt):
            return replace(row, index=index)
        if not isinstance(row, Mapping | str):
            raise ValueError(f"row {index} is a {type(row).__name__}; give a text, a Prompt or a mapping of columns")
        columns = _plain({"prompt": row} if isinstance(row, str) else dict(cast(Mapping[str, Any], row)))
        if not all(isinstance(name, str) for name in columns):
            raise ValueError(f"row {index} has the columns {list(columns)}; name each with a text")
        messages = self._messages(columns, index)
        if self._system is not None:
            if any(message.role == "system" for message in messages):
                raise ValueError(
                    f"row {index} has a system message, and so has Task(system=...); leave one of them out"
                )
            messages = (Message(role="system", content=self._system), *messages)
        teacher = None if self._teacher is None else columns.get(self._teacher)
        if self._teacher is not None and not isinstance(teacher, str):
            raise ValueError(
                f"row {index} has {teacher!r} in the column {self._teacher} (Task(teacher=...)); give the name of a "
                "teacher, or an empty text for none"
            )
        return Prompt(index=index, messages=messages, target=columns, teacher=teacher)

    def _messages(self, columns: Mapping[str, Any], index: int) -> tuple[Message, ...]:
        there = f"row {index} has the columns {', '.join(map(str, columns)) or '(none)'}"
        if self._template is not None:
            try:
                fields = [name or "" for _, name, _, _ in string.Formatter().parse(self._template)]
                if empty := [name for name in fields if columns.get(name, "") is None]:
                    raise ValueError(f"the column {empty[0]} of row {index} has no value")
                return (Message(role="user", content=self._template.format(**columns)),)
            except KeyError as error:
                raise ValueError(f"template needs the column {error}, and {there}") from error
            except Exception as error:
                raise ValueError(
                    f"template is {self._template!r}, which cannot be filled: {error}; write a column as {{name}}, a "
                    f"brace as {{{{, and {there}"
                ) from error
        if isinstance(text := columns.get("prompt"), str):
            return (Message(role="user", content=text),)
        name = "prompt" if columns.get("messages") is None else "messages"
        if columns.get(name) is None:
            raise ValueError(f"{there}; give prompt, messages, or a template with other columns")
        if isinstance(columns[name], tuple):
            columns = {**columns, name: list(columns[name])}
        try:
            return tuple(read_message(message, strict=False) for message in Fields(columns).objects(name))
        except EndpointError as error:
            raise ValueError(f"row {index}: {error}") from error


def _plain(value: Any) -> Any:
    """A value of a row: arrays become lists, missing values (NaN, NaT, NA) None, and texts are safe for UTF-8."""
    if isinstance(value, str):
        return safe_text(value)
    if hasattr(value, "tolist"):  # numpy, also its scalars
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in cast(dict[Any, Any], value).items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    missing = type(value).__name__ in ("NaTType", "NAType") or (isinstance(value, float | Decimal) and value != value)
    return None if missing else value


class Epochs:
    """The rows of a sequence, reshuffled in each epoch. With 3 rows, index 7 is the second row of epoch 2.

    Args:
        rows: not empty.
        seed: number that fixes the shuffle; None keeps the order of the rows.
    """

    def __init__(self, rows: Sequence[Any], *, seed: int | None) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = -1
        self._order: Sequence[int] = ()

    def __getitem__(self, index: int) -> Any:
        epoch, at = divmod(index, len(self._rows))
        if epoch != self._epoch:
            self._epoch, order = epoch, list(range(len(self._rows)))
            if self._seed is not None:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = order
        return self._rows[self._order[at]]


class Stream:
    """The rows that a generator function yields, by index. A smaller index than the last one restarts it.

    Args:
        start: starts the generator; it must yield the same rows each time.
        name: word for the source in error texts.
    """

    def __init__(self, start: Callable[[], Iterator[Any]], *, name: str) -> None:
        self._start = start
        self._name = name
        self._rows: Iterator[Any] = iter(())
        self._next = -1
        self._recent: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index in self._recent:
            return self._recent[index]
        try:
            if self._next < 0 or index < self._next:
                started: Any = self._start()
                if not isinstance(started, Iterator):
                    kind = type(started).__name__
                    raise TypeError(f"the function returns a {kind}; yield rows, or give a list itself")
                self._rows, self._next = cast(Iterator[Any], started), 0
            while self._next <= index:
                self._recent[self._next] = next(self._rows)
                self._recent.pop(self._next - CHECKED, None)
                self._next += 1
        except StopIteration:
            raise ValueError(
                f"{self._name} ended after {self._next} rows; yield without end, or give a list, which is repeated"
            ) from None
        except Exception as error:
            raise ValueError(f"{self._name} failed at row {max(0, self._next)}: {describe_error(error)}") from error
        return self._recent[index]


def open_rows(source: Source, *, seed: int, name: str) -> Sequence[Any] | Stream:
    """The rows of a source.

    Args:
        seed: argument of a generator function.
        name: word for the source in error texts.

    Raises:
        ValueError: the source cannot be read, is empty, or is of another kind; names it.
    """
    if isinstance(source, str | Path):
        rows = _read(source, name=name)
    elif callable(source):
        start = cast(Callable[..., Iterator[Any]], source)
        arguments = (seed,) if inspect.signature(start).parameters else ()
        return Stream(lambda: start(*arguments), name=name)
    else:
        rows = _rows_of(source)
    if not all(hasattr(rows, each) for each in ("__getitem__", "__len__")) or isinstance(rows, Mapping | bytes):
        raise ValueError(f"{name} is a {type(cast(object, rows)).__name__}; {GIVE}")
    if not len(rows):
        raise ValueError(f"{name} has no rows")
    return rows


def _rows_of(source: Any) -> Any:
    """The rows of a table or an array, as mappings or values; other sources stay as they are."""
    if hasattr(source, "iloc") and hasattr(source, "columns"):  # pandas
        return source.to_dict("records")
    for method in ("to_dicts", "to_pylist", "tolist"):  # polars, pyarrow, numpy and columns of pandas
        if hasattr(source, method):
            return getattr(source, method)()
    return source


def split_rows(rows: Sequence[Any], *, share: float, name: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """(rows to train on, held-out rows), the same ones in every run.

    Args:
        share: part of the rows that is held out, between 0 and 1.
    """
    count = round(len(rows) * share)
    if not 0 < count < len(rows):
        raise ValueError(f"validation is {share:g} of the {len(rows)} rows of {name}; leave at least one on each side")
    held_out = set(random.Random("validation").sample(range(len(rows)), count))
    return Chosen(rows, [i for i in range(len(rows)) if i not in held_out]), Chosen(rows, sorted(held_out))


def leave_out(
    rows: Sequence[Any], reason_against: Callable[[Any, int], str | None], *, name: str
) -> tuple[Sequence[Any], list[str]]:
    """The rows that are used, and a text for each reason that counts the others.

    Only the first CHECKED rows are looked at.

    Args:
        reason_against: (row, index) -> why the row is left out; None keeps it.
        name: word for the source in the texts.

    Raises:
        ValueError: no row is left.
    """
    kept: list[int] = []
    reasons: Counter[str] = Counter()
    for index in range(min(CHECKED, len(rows))):
        reason = reason_against(rows[index], index)
        if reason is None:
            kept.append(index)
        else:
            reasons[reason] += 1
    notes = [f"{count} of {len(rows)} rows of {name} are left out: {reason}" for reason, count in reasons.items()]
    if not kept:
        raise ValueError(f"no row of {name} is left: {'; '.join(notes)}")
    return (Chosen(rows, [*kept, *range(CHECKED, len(rows))]) if notes else rows), notes


class Chosen(Sequence[Any]):
    """Some rows of a sequence that may read a row only when it is asked for."""

    def __init__(self, rows: Sequence[Any], indices: Sequence[int]) -> None:
        self._rows = rows
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[self._indices[index]]


def _read(source: str | Path, *, name: str) -> Sequence[Any]:
    path = Path(source)
    try:
        if path.suffix in (".jsonl", ".json"):
            return _read_json(path)
        if path.suffix == ".parquet":
            return _datasets().Dataset.from_parquet(str(path), keep_in_memory=False)
        if path.is_dir():
            return _datasets().load_from_disk(str(path))
        if path.exists() or path.suffix:
            raise ValueError("use .jsonl, .json or .parquet, or a folder that datasets saved")
        dataset, _, split = str(source).partition(":")
        return _datasets().load_dataset(dataset, split=split or "train")
    except Exception as error:
        raise ValueError(f"{name} is {str(source)!r}, which cannot be read: {error}") from error


def _read_json(path: Path) -> list[Any]:
    if path.suffix == ".json":
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(found, list):
            raise ValueError(f"it is a {type(found).__name__}; give a list of rows")
        return cast(list[Any], found)
    rows: list[Any] = []
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is not JSON: {error.msg}") from error
    return rows


def _datasets() -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("this kind of source needs the package datasets: pip install 'async-rl[data]'") from error
    return datasets
