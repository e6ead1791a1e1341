"""Takes back what a run recorded after the checkpoint that it goes on from: each step and group is there once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, cast

ENDED_UNSEEN = "ended before it was recorded: the run was killed"


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


def unseen_groups(directory: Path, *, next_group: int, live: Collection[int]) -> list[dict[str, Any]]:
    """Ledger records of groups that ended, and whose records a kill kept from `ledger.jsonl`: dropped ones.

    Groups that were trained up to a checkpoint are recorded before it is made.
    """
    seen = {line.get("group") for line in _lines(directory / "ledger.jsonl")}
    return [
        {
            "group": group,
            "admitted_version": None,
            "outcome": "dropped",
            "reason": ENDED_UNSEEN,
            "train_step": None,
            "segments": None,
            "tokens": None,
            "masked_tokens": None,
        }
        for group in range(next_group)
        if group not in seen and group not in live
    ]


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
    """Records of a file, but for a last line that was cut short."""
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
