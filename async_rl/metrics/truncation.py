"""Truncates the records of a run to the checkpoint that it resumes from, so that no step or group appears twice."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, cast

from async_rl.files.jsonl import read_lines
from message_queue.ledger import Drop, DropKind

ENDED_UNRECORDED = Drop(DropKind.UNRECORDED, "the run was killed")
RECORD_LOST = Drop(
    DropKind.RECORD_LOST, "the group was trained before the checkpoint or dropped; the file is incomplete"
)
STEP_FILES = ("metrics.jsonl", "schedule.jsonl")


def truncate_records(
    directory: Path, *, train_step: int, next_group: int | None = None, live: Collection[int] = ()
) -> None:
    """Remove records that do not belong to the checkpoint of `train_step`; each file is replaced atomically.

    metrics.jsonl, validation.jsonl and schedule.jsonl keep lines up to `train_step`. ledger.jsonl keeps groups that
    were trained up to `train_step` or dropped. Damaged lines are removed.

    Args:
        directory: run directory.
        train_step: step of the checkpoint.
        next_group: ledger records of this and larger ids are removed, because new groups get these ids; None keeps
            them.
        live: ids of groups that continue in flight after the restart; their ledger records are removed.
    """

    def ended(line: dict[str, Any]) -> bool:
        group = cast(int, line.get("group", 0))
        return _ended(line, train_step) and group not in live and (next_group is None or group < next_group)

    for name in ("metrics.jsonl", "validation.jsonl", "schedule.jsonl"):
        _keep(directory / name, lambda line: line["train_step"] <= train_step)
    _keep(directory / "ledger.jsonl", ended)


def missing_records(directory: Path, *, train_step: int, trained: int) -> list[str]:
    """Describe records that are missing although the checkpoint includes them, one sentence per file.

    Call this before `truncate_records`. Records are synced before the checkpoint is written: they are missing only if a
    file was changed or the disk failed. A line of metrics.jsonl covers the `optimizer_steps` steps up to its
    `train_step`; with the lines (train_step=2, optimizer_steps=2) and (6, 2) and a checkpoint of step 6 the steps 3 and
    4 are missing. Steps before the first line are not expected, because they may be in the directory of another run.

    Args:
        directory: run directory.
        train_step: step of the checkpoint.
        trained: number of groups trained up to that step.
    """
    found = {name: _steps(directory / name) for name in STEP_FILES}
    lost: list[str] = []
    for name, steps in found.items():
        if not steps and name != "metrics.jsonl":
            continue
        missing = sorted(set(range(min(steps, default=1), train_step + 1)) - steps)
        if missing:
            lost.append(f"{name} lacks {len(missing)} train steps, {missing[0]} to {missing[-1]}")
    if min(found["metrics.jsonl"], default=1) == 1:  # else earlier groups are in the records of another run
        lines = _lines(directory / "ledger.jsonl")
        recorded = sum(line["outcome"] == "trained" and line["train_step"] <= train_step for line in lines)
        if recorded < trained:
            lost.append(f"ledger.jsonl has {recorded} of {trained} groups that were trained")
    why = f"though the checkpoint of train step {train_step} is newer; the file was changed or cut by a power loss"
    return [f"{text}, {why}. The run continues without these records" for text in lost]


def unrecorded_groups(
    directory: Path, *, next_group: int, live: Collection[int], lost: bool = False
) -> list[dict[str, Any]]:
    """Ledger records for groups that ended without one because the run was killed; their outcome is `dropped`.

    Args:
        directory: run directory.
        next_group: first group id that was not admitted before the checkpoint.
        live: ids of groups that are still in flight.
        lost: whether records of trained groups are missing too, so that the groups may have been trained; the reason
            is then `RECORD_LOST`.
    """
    reason = RECORD_LOST if lost else ENDED_UNRECORDED
    seen = {line.get("group") for line in _lines(directory / "ledger.jsonl")}
    return [
        {
            "group": group,
            "admitted_version": None,
            "outcome": "dropped",
            "kind": reason.kind,
            "reason": str(reason),
            "train_step": None,
            "segments": None,
            "tokens": None,
            "masked_tokens": None,
        }
        for group in range(next_group)
        if group not in seen and group not in live
    ]


def _steps(path: Path) -> set[int]:
    """Train steps that the lines of a file cover: a line covers the `optimizer_steps` steps up to its `train_step`."""
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
    """Records of a file without damaged lines; none if the file does not exist."""
    if not path.is_file():
        return
    for line in read_lines(path, errors="replace"):
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)
