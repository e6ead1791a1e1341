"""Checks of the teachers of a run that read their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from agent_loop.user_errors import describe_error
from async_rl.config import RunConfig
from async_rl.inference.select import check_engine
from async_rl.inference.sglang.config import SglangConfig
from async_rl.inference.sglang.server import interpreter
from async_rl.weights.model_info import CheckpointError, is_quantized, read_model_info
from async_rl.weights.quantized import dequantization_problems, plain_folder
from message_queue.errors import EngineError


def teacher_problems(config: RunConfig, student: Path) -> Iterator[str]:
    """Why a teacher cannot be served, or cannot score the tokens of the student; each names `teachers.NAME`.

    Args:
        student: the checkpoint that is trained.
    """
    for name, teacher in config.teachers.items():
        field, checkpoint = f"teachers.{name}", teacher.checkpoint
        try:
            info = read_model_info(checkpoint)
            check_engine(teacher.engine, checkpoint=checkpoint, capture=False, force=False)
            if isinstance(teacher.engine, SglangConfig) and config.cluster.address is None:
                interpreter(teacher.engine)
            if is_quantized(checkpoint):
                folder = plain_folder(checkpoint, cache=config.model.cache)
                yield from (f"{field}: {problem}" for problem in dequantization_problems(checkpoint, folder=folder))
        except (CheckpointError, EngineError) as error:
            yield f"{field}.checkpoint: {error}"
            continue
        except ValueError as error:
            yield from (f"{field}: {line}" for line in f"{error}".splitlines())
            continue
        if (ids := config.distillation.num_ids) >= info.vocab_size:
            yield f"distillation.top_k is {ids}, and {field} has {info.vocab_size} tokens; lower it"
        if difference := _difference(checkpoint, student):
            yield (
                f"{field}.checkpoint is {checkpoint}, whose tokenizer is another one than that of the student, "
                f"{student}: {difference}; use a teacher with the student's tokens"
            )


def _difference(teacher: Path, student: Path) -> str:
    """The first token of the student that has another id in the teacher's tokenizer; empty if there is none."""
    tables: list[dict[str, int]] = []
    for checkpoint in (teacher, student):
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        except Exception as error:  # noqa: BLE001 - the libraries raise many kinds
            return f"that of {checkpoint} cannot be loaded ({describe_error(error).partition('. ')[0]})"
        tables.append(tokenizer.get_vocab())
    theirs, ours = tables
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if (found := theirs.get(token)) != number:
            return f"{token!r} is {number} there, and {'not a token' if found is None else found} here"
    return ""
