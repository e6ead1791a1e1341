"""An environment of the package reasoning-gym: questions that it draws, and answers that it scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import count, islice
from typing import Any

from agent_loop.reward import Completion
from async_rl.rollout.task import Task

FIRST_TRAINED = 1_000_000  # index of the first question to train on; those before it are held out
MOST_SKIPPED = 10_000  # held-out questions in a row, after which an environment is taken to have no others
SIZE = 1 << 40  # questions of an environment; they are drawn one by one


def reasoning_gym_task(
    *, environment: str = "chain_sum", settings: Mapping[str, Any] | None = None, held_out: int = 256, seed: int = 0
) -> Task:
    """The task of `--recipe reasoning_gym`.

    Question i is a function of seed + i alone. Reward is the score of the environment, from 0 to 1, of the text in the
    last <answer> tags; without them it is that of no answer.

    Args:
        environment: name of a dataset of reasoning-gym.
        settings: options of the environment, for example min_terms=2 for chain_sum.
        held_out: so many questions are never trained on. It must be at least validation.prompts.
        seed: number added to each i.

    Raises:
        ValueError: the package is absent, or it knows neither the environment nor its settings.
    """
    try:
        gym: Any = import_module("reasoning_gym")
        utils: Any = import_module("reasoning_gym.utils")
    except ImportError as error:
        raise ValueError(
            f"reasoning-gym cannot be imported ({error}); pip install 'async-rl[reasoning-gym]'"
        ) from error
    try:
        questions: Any = gym.create_dataset(environment, size=SIZE, seed=seed, **(settings or {}))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(
            f"task.options.environment is {environment!r} with settings={dict(settings or {})}, which reasoning-gym "
            f"refuses: {error}"
        ) from error

    def rows(start: int) -> Iterator[dict[str, Any]]:
        for index in count(start):
            yield {"prompt": questions[index]["question"], "index": index, "answer": f"{questions[index]['answer']}"}

    def validation() -> Iterator[dict[str, Any]]:
        return islice(rows(0), held_out)

    def prompts() -> Iterator[dict[str, Any]]:
        known = {row["prompt"] for row in validation()}
        skipped = 0
        for row in rows(FIRST_TRAINED):
            if row["prompt"] not in known:
                skipped = 0
                yield row
            elif (skipped := skipped + 1) == MOST_SKIPPED:
                raise ValueError(f"{skipped} questions of {environment} in a row are held out; lower held_out")

    def score(completion: Completion, index: int) -> float:
        return float(questions.score_answer(utils.extract_answer(completion.text), entry=questions[index]))

    return Task(prompts=prompts, validation=validation, rewards=score, system=utils.SYSTEM_PROMPTS["default"])
