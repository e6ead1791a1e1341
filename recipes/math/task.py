"""Word problems in the format of GSM8K: rows with `question`, and with `answer`, whose last line is `#### 42`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from agent_loop.reward import math_answer
from async_rl.rollout.data import open_rows
from async_rl.rollout.task import Task

from .make_sample import SAMPLE
from .sample_task import SampleTask

TEMPLATE = "{question}\nReason step by step. Write the answer on the last line after ####."


def math_task(
    *,
    train: str = str(SAMPLE / "train.jsonl"),
    validation: str = str(SAMPLE / "validation.jsonl"),
    max_prompt_tokens: int | None = None,
) -> Task:
    """The task of `--recipe math`. Only the sample has a tiny model; other files need `model.checkpoint`.

    Args:
        train: `.jsonl` or `.parquet` file in the format of GSM8K.
        validation: another file, not trained on.
        max_prompt_tokens: longer prompts are left out.
    """
    kind = SampleTask if Path(train).parent == SAMPLE else Task
    return kind(
        prompts=read_gsm8k(train, name="task.options.train"),
        validation=read_gsm8k(validation, name="task.options.validation"),
        template=TEMPLATE,
        rewards=math_answer(),
        max_prompt_tokens=max_prompt_tokens,
    )


def read_gsm8k(path: str, *, name: str) -> list[dict[str, str]]:
    """Rows with the columns question, solution (the text) and answer (its number, without commas).

    `{"question": "3+4?", "answer": "3+4=7\\n#### 7"}` becomes question "3+4?", solution "3+4=7\\n#### 7", answer "7".

    Args:
        name: file name in error texts.

    Raises:
        ValueError: the file cannot be read, or a row has another form; names the row.
    """
    rows = cast(Sequence[Any], open_rows(path, seed=0, name=name))
    return [_read_row(row, where=f"row {index} of {name}={path}") for index, row in enumerate(rows)]


def _read_row(row: Any, *, where: str) -> dict[str, str]:
    columns = cast(Mapping[str, Any], row) if isinstance(row, Mapping) else {}
    question, solution = columns.get("question"), columns.get("answer")
    if not isinstance(question, str) or not isinstance(solution, str):
        raise ValueError(f"{where} has no texts `question` and `answer`; use rows in the format of GSM8K")
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise ValueError(f"{where}: answer has no last line `#### NUMBER`; use rows in the format of GSM8K")
    return {"question": question, "solution": solution, "answer": answer.strip().replace(",", "")}
