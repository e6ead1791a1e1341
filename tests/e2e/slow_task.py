"""The parity task in turns of a fixed length with a slow environment between them, so that much is always in flight."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from agent_loop.decoder import SegmentDecoder, budget_left, observe_prompt
from message_queue.tokens import StopReason
from recipes.calculator.task import CalculatorConfig, CalculatorTask, build_chat

TURNS = 4
REPLY = np.array([11, 12, 13], np.int32)


class SlowTurns:
    """Every turn takes its whole budget; every other rollout of a group has reward 1, so that each group is trained."""

    def __init__(self, *, engine, chat, limits, sampling, turn_s, may_end) -> None:
        self._engine, self._chat, self._limits = engine, chat, limits
        self._sampling, self._turn_s, self._may_end = sampling, turn_s, may_end

    async def run(self, prompt, *, trajectory, session, cache_salt):
        decoder = SegmentDecoder(
            self._engine,
            sampling=self._sampling,
            stop_token_ids=(),
            session=session,
            cache_salt=cache_salt,
            limits=self._limits,
        )
        observe_prompt(trajectory, self._chat.prompt(prompt.messages), index=prompt.index, limits=self._limits)
        while True:
            await decoder.decode(trajectory, max_new_tokens=budget_left(trajectory, self._limits))
            await asyncio.sleep(self._turn_s)
            if len(trajectory.turns) == TURNS:
                break
            last = len(trajectory.turns) == TURNS - 1
            while last and not self._may_end(prompt.index):  # noqa: ASYNC110 - another process allows it
                await asyncio.sleep(self._turn_s)
            trajectory.observe(REPLY)
        trajectory.close(stop_reason=StopReason.LENGTH, reward=float(int(session[-1]) % 2))


class SlowTask(CalculatorTask):
    """may_end: whether the rollouts of a prompt may take their last turn now."""

    def __init__(self, *args, may_end=lambda _prompt: True, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._may_end = may_end

    def build_loop(self, *, engine, tokenizer, sampling, limits, gate=None):
        return SlowTurns(
            engine=engine,
            chat=build_chat(tokenizer),
            limits=limits,
            sampling=sampling,
            turn_s=0.8,
            may_end=self._may_end,
        )


def slow_task(options, *, seed):
    """Build it; see `task.factory`."""
    return SlowTask(CalculatorConfig(**options), seed=seed)


def gated_task(options, *, seed):
    """A slow task whose prompts from `first` on wait for a file `gate`/`prompt`, or `gate`/all."""
    gate, first, rest = Path(options["gate"]), options["first"], {**options}
    del rest["gate"], rest["first"]

    def may_end(prompt):
        return prompt < first or (gate / str(prompt)).exists() or (gate / "all").exists()

    return SlowTask(CalculatorConfig(**rest), seed=seed, may_end=may_end)
