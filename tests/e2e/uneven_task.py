"""A task in which the rollouts of some prompts last for several train steps, however fast the machine is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from agent_loop.decoder import SegmentDecoder, budget_left, observe_prompt
from message_queue.tokens import StopReason
from recipes.calculator.task import CalculatorConfig, CalculatorTask, build_chat

LATE_EVERY = 8  # of so many prompts one is late
LATE_STEPS = 3  # train steps that pass between its two turns
FIRST_TURN = 900  # tokens: decoding them takes longer than a train step, so that a publish finds rollouts in the engine
REPLY = np.array([11, 12, 13], np.int32)


class UnevenTurns:
    """A long turn and a short one; reward 1 for an even sum of the tokens.

    Args:
        metrics: file of the run with one line per train step.
    """

    def __init__(self, *, engine, chat, limits, sampling, metrics) -> None:
        self._engine, self._chat, self._limits = engine, chat, limits
        self._sampling, self._metrics = sampling, metrics

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
        if len(trajectory.turns) == 1:
            left = FIRST_TURN - trajectory.turns[0].num_sampled
            if left > 0:
                await decoder.decode(trajectory, max_new_tokens=left)
            if session.startswith("g") and prompt.index % LATE_EVERY == 1:
                await self._steps_pass()
            trajectory.observe(REPLY)
        await decoder.decode(trajectory, max_new_tokens=budget_left(trajectory, self._limits))
        trajectory.close(stop_reason=StopReason.LENGTH, reward=float(trajectory.token_ids().sum() % 2))

    async def _steps_pass(self) -> None:
        enough = self._num_steps() + LATE_STEPS
        while self._num_steps() < enough:  # noqa: ASYNC110 - another part of the run writes the file
            await asyncio.sleep(0.05)

    def _num_steps(self) -> int:
        return self._metrics.read_text().count("\n")


class UnevenTask(CalculatorTask):
    def __init__(self, config, *, seed, metrics):
        super().__init__(config, seed=seed)
        self._metrics = metrics

    def build_loop(self, *, engine, tokenizer, sampling, limits, gate=None):
        return UnevenTurns(
            engine=engine, chat=build_chat(tokenizer), limits=limits, sampling=sampling, metrics=self._metrics
        )


def uneven_task(options, *, seed):
    """Build it; see `task.factory`. Option run_directory: of the run itself."""
    fields = dict(options)
    metrics = Path(fields.pop("run_directory")) / "metrics.jsonl"
    return UnevenTask(CalculatorConfig(**fields), seed=seed, metrics=metrics)
