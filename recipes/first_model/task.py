"""Numbers to sort: a short task that a small instruct model solves now and then before training."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from agent_loop.reward import Completion
from async_rl.rollout.task import Task

SYSTEM = "Sort the numbers."
LOWEST, HIGHEST = 10, 99
EXAMPLES = ((70, 31, 52, 15, 88), (12, 64, 40, 93, 27))  # of two numbers, the first pair changes places


def sort_task(*, count: int = 2, held_out: int = 256, seed: int = 0) -> Task:
    """The task of `--recipe first_model`: two-digit numbers, to be repeated from the smallest to the largest.

    A prompt shows two examples, and then asks for `83 17`. Reward is 1 if the reply is `17 83` and nothing else, except
    for white space at its ends, else 0.

    Args:
        count: numbers in a question.
        held_out: questions that are never trained on, in any order of their numbers; at least validation.prompts.
        seed: seed of the questions to train on. The held-out ones are the same for each seed.

    Raises:
        ValueError: an option is out of range; names it.
    """
    if not 2 <= count <= len(EXAMPLES[0]):
        raise ValueError(f"task.options.count is {count}; use 2 to {len(EXAMPLES[0])}")
    if not 0 <= held_out <= 1000:
        raise ValueError(f"task.options.held_out is {held_out}; use 0 to 1000, of 4005 pairs of numbers")
    reserved: dict[tuple[int, ...], tuple[int, ...]] = {}
    order = random.Random("held out")
    while len(reserved) < held_out:
        numbers = _draw(order, count)
        reserved.setdefault(tuple(sorted(numbers)), numbers)

    def row(numbers: tuple[int, ...]) -> dict[str, Any]:
        messages = [{"role": "system", "content": SYSTEM}]
        for asked in (*(example[:count] for example in EXAMPLES), numbers):
            messages += [
                {"role": "user", "content": _text(asked)},
                {"role": "assistant", "content": _text(sorted(asked))},
            ]
        return {"messages": messages[:-1], "answer": messages[-1]["content"]}

    def prompts() -> Iterator[dict[str, Any]]:
        drawn = random.Random(seed)
        while True:
            numbers = _draw(drawn, count)
            if tuple(sorted(numbers)) not in reserved:
                yield row(numbers)
                yield row(numbers[::-1])  # of both orders alike, so that no fixed order earns more in a batch

    return Task(prompts=prompts, validation=[row(numbers) for numbers in reserved.values()], rewards=exact)


def exact(completion: Completion, answer: str) -> bool:
    """Whether a reply is the answer."""
    return completion.text.strip() == answer


def _draw(order: random.Random, count: int) -> tuple[int, ...]:
    return tuple(order.sample(range(LOWEST, HIGHEST + 1), count))


def _text(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
