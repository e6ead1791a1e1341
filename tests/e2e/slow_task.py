"""The parity task in turns of a fixed length with a slow environment between them, so that much is always in flight."""

from __future__ import annotations

import asyncio

import numpy as np

from agent_loop.segments import SegmentDecoder, budget_left, observe_prompt
from message_queue.tokens import StopReason
from recipes.calculator.task import CalculatorConfig, CalculatorTask, build_chat

TURNS = 4
REPLY = np.array([11, 12, 13], np.int32)


class SlowTurns:
    """Every turn takes its whole budget; reward 1 for an even sum of its tokens."""

    def __init__(self, *, engine, chat, limits, sampling, turn_s) -> None:
        self._engine, self._chat, self._limits = engine, chat, limits
        self._sampling, self._turn_s = sampling, turn_s

    async def run(self, prompt, *, trajectory, session, cache_salt):
        decoder = SegmentDecoder(
            self._engine,
            sampling=self._sampling,
            stop_token_ids=(),
            session=session,
            cache_salt=cache_salt,
            timeout_s=self._limits.generate_timeout_s,
        )
        observe_prompt(trajectory, self._chat.prompt(prompt.messages), index=prompt.index, limits=self._limits)
        while True:
            await decoder.decode(trajectory, max_new_tokens=budget_left(trajectory, self._limits))
            await asyncio.sleep(self._turn_s)
            if len(trajectory.turns) == TURNS:
                break
            trajectory.observe(REPLY)
        trajectory.close(stop_reason=StopReason.LENGTH, reward=float(trajectory.token_ids().sum() % 2))


class SlowTask(CalculatorTask):
    def build_loop(self, *, engine, tokenizer, sampling, limits, gate=None):
        return SlowTurns(engine=engine, chat=build_chat(tokenizer), limits=limits, sampling=sampling, turn_s=0.8)


def slow_task(options, *, seed):
    """Build it; see `task.factory`."""
    return SlowTask(CalculatorConfig(**options), seed=seed)
