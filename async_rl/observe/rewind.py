"""Takes back what a run recorded after the checkpoint that it goes on from: each step and group is there once."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, cast

from async_rl.jsonl import read_lines

ENDED_UNSEEN = "ended before it was recorded: the run was killed"
RECORD_LOST = "record lost: trained up to the checkpoint, or dropped; the file lost a part of what was written"
STEP_FILES = ("metrics.jsonl", "schedule.jsonl")


def rewind(directory: Path, *, train_step: int, next_group: int | None = None, live: Collection[int] = ()) -> None:
    """Of `ledger.jsonl` keep groups that ended, of the others (metrics, validation, schedule) steps up to `train_step`.

    Groups that are `live` did not end: the journal lost that. Those from `next_group` on, where it is given, it lost
    altogether, and others get their ids. A last line that was cut short goes too. Each file is replaced as a whole.
    """

    def ended(line: dict[str, Any]) -> bool:
        group = cast(int, line.get("group", 0))
        return _ended(line, train_step) and group not in live and (next_group is None or group < next_group)

    for name in ("metrics.jsonl", "validation.jsonl", "schedule.jsonl"):
        _keep(directory / name, lambda line: line["train_step"] <= train_step)
    _keep(directory / "ledger.jsonl", ended)


def missing_records(directory: Path, *, train_step: int, trained: int) -> list[str]:
    """What a checkpoint holds and the records do not, a sentence for each file; call it before `rewind`.

    Records are on the disk before the checkpoint is: only a disk that lost what it said it had, or somebody who changed
    a file, makes this more than nothing.

    Args:
        train_step: of the checkpoint; there is a line of `metrics.jsonl` for the `optimizer_steps` that end with each,
            from the first step of the run in this directory on, and of `schedule.jsonl` where the run writes it.
        trained: groups up to that step.
    """
    found = {name: _steps(directory / name) for name in STEP_FILES}
    lost: list[str] = []
    for name, steps in found.items():
        if not steps and name != "metrics.jsonl":
            continue
        missing = sorted(set(range(min(steps, default=1), train_step + 1)) - steps)
        if missing:
            lost.append(f"{name} lacks {len(missing)} train steps, {missing[0]} to {missing[-1]}")
    if min(found["metrics.jsonl"], default=1) == 1:  # else the groups before it are in the records of another run
        lines = _lines(directory / "ledger.jsonl")
        recorded = sum(line["outcome"] == "trained" and line["train_step"] <= train_step for line in lines)
        if recorded < trained:
            lost.append(f"ledger.jsonl has {recorded} of {trained} groups that were trained")
    why = f"though the checkpoint of train step {train_step} is newer; the file was changed, or a loss of power cut it"
    return [f"{text}, {why}. The run goes on without them" for text in lost]


def unseen_groups(
    directory: Path, *, next_group: int, live: Collection[int], lost: bool = False
) -> list[dict[str, Any]]:
    """Ledger records of groups that ended, and whose records a kill kept from `ledger.jsonl`: dropped ones.

    Groups that were trained up to a checkpoint are recorded before it is made. lost: some such records are missing, so
    that nobody can tell these groups from dropped ones.
    """
    seen = {line.get("group") for line in _lines(directory / "ledger.jsonl")}
    return [
        {
            "group": group,
            "admitted_version": None,
            "outcome": "dropped",
            "reason": RECORD_LOST if lost else ENDED_UNSEEN,
            "train_step": None,
            "segments": None,
            "tokens": None,
            "masked_tokens": None,
        }
        for group in range(next_group)
        if group not in seen and group not in live
    ]


def _steps(path: Path) -> set[int]:
    """Train steps that the lines of a file are of; a line is of the `optimizer_steps` up to its `train_step`."""
    steps: set[int] = set()
    for line in _lines(path):
        last = cast(int, line["train_step"])
        steps.update(range(last - cast(int, line.get("optimizer_steps", 1)) + 1, last + 1))
    return steps


def _ended(line: dict[str, Any], train_step: int) -> bool:
    match line["outcome"]:
        case "trained":
            return cast(int, line["train_step"]) <= train_step
        case outcome:
            return outcome == "dropped"


def _keep(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    if not path.is_file():
        return
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        for line in _lines(path):
            if wanted(line):
                file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file, but for lines that are not whole."""
    if not path.is_file():
        return
    for line in read_lines(path, errors="replace"):
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)
