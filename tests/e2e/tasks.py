"""Variants of the calculator task for runs of tests: every step trains, and much is in flight."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from agent_loop.chat import Chat
from agent_loop.decoder import SegmentDecoder, budget_left, observe_prompt
from message_queue.tokens import StopReason
from recipes.calculator.task import CalculatorConfig, CalculatorTask, build_chat
from recipes.calculator.tokenizer import END_OF_TURN
from tests.helpers.agents import LossyNetwork, RandomAgent, over_http

REPLY = np.array([11, 12, 13], np.int32)
TURNS = 4  # of a slow rollout
TURN_S = 0.8  # of the environment between them
LATE_EVERY = 8  # one of so many uneven prompts is late
LATE_STEPS = 3  # train steps between its two turns
LONG_EVERY = 3  # one of so many uneven prompts decodes until a train step has ended
FIRST_TURN = 100  # tokens
LONG_TURN = 800  # most tokens of a long first turn
PART = 50  # tokens of a first turn that are decoded at once
LAST_TURN = 16  # tokens


class EvenLength:
    """1 for an answer of an even number of characters. A random model earns it half of the time."""

    async def score(self, prompt, *, completion):
        return float(sum(map(len, completion.turns)) % 2 == 0)


class Turns:
    """A loop whose turns are decoded without stop tokens; `turns` makes them and returns the reward."""

    def __init__(self, *, engine, chat, limits, sampling, turns) -> None:
        self._engine, self._chat, self.limits = engine, chat, limits
        self._sampling, self._turns = sampling, turns

    async def run(self, prompt, *, trajectory, session, cache_salt):
        decoder = SegmentDecoder(
            self._engine,
            sampling=self._sampling,
            stop_token_ids=(),
            session=session,
            cache_salt=cache_salt,
            limits=self.limits,
        )
        observe_prompt(trajectory, self._chat.prompt(prompt.messages), index=prompt.index, limits=self.limits)

        async def decode(max_new_tokens=None):
            left = budget_left(trajectory, self.limits) if max_new_tokens is None else max_new_tokens
            await decoder.decode(trajectory, max_new_tokens=left)

        reward = await self._turns(decode, trajectory, prompt.index, session)
        trajectory.close(stop_reason=StopReason.LENGTH, reward=float(reward))


class TurnsTask(CalculatorTask):
    """The calculator task with other turns."""

    def __init__(self, options, *, seed, turns) -> None:
        super().__init__(CalculatorConfig(**options), seed=seed)
        self._turns = turns

    def build_loop(self, *, engine, tokenizer, sampling, limits, gate=None):
        chat = build_chat(tokenizer)
        return Turns(engine=engine, chat=chat, limits=limits, sampling=sampling, turns=self._turns)


class ParityTask(CalculatorTask):
    """The calculator task with the reward `EvenLength`."""

    reward = EvenLength()


def parity_task(options, *, seed):
    return ParityTask(CalculatorConfig(**options), seed=seed)


def slow_turns(may_end):
    """Turns of the whole budget, with a slow environment between them; the last waits until `may_end(prompt)`.

    Every other rollout of a group has reward 1, so that each group is trained.
    """

    async def turns(decode, trajectory, prompt, session):
        while True:
            await decode()
            await asyncio.sleep(TURN_S)
            if len(trajectory.turns) == TURNS:
                return int(session[-1]) % 2
            while len(trajectory.turns) == TURNS - 1 and not may_end(prompt):  # noqa: ASYNC110 - a file
                await asyncio.sleep(TURN_S)
            trajectory.observe(REPLY)

    return turns


def slow_task(options, *, seed):
    """Slow turns, so that much is always in flight."""
    return TurnsTask(options, seed=seed, turns=slow_turns(lambda _prompt: True))


def gated_task(options, *, seed):
    """A slow task whose prompts from `first` on wait for a file `gate`/`prompt`, or `gate`/all."""
    rest = dict(options)
    gate, first = Path(rest.pop("gate")), rest.pop("first")

    def may_end(prompt):
        return prompt < first or (gate / str(prompt)).exists() or (gate / "all").exists()

    return TurnsTask(rest, seed=seed, turns=slow_turns(may_end))


def uneven_task(options, *, seed):
    """Two turns; rollouts of some prompts last for several train steps, on any machine.

    A publish finds those with a long first turn in the engine. Option run_directory: of the run itself. Reward 1 for an
    odd sum of the tokens.
    """
    rest = dict(options)
    metrics = Path(rest.pop("run_directory")) / "metrics.jsonl"

    def num_steps():
        return metrics.read_text().count("\n")

    async def turns(decode, trajectory, prompt, session):
        if len(trajectory.turns) == 1:
            first, train_step = trajectory.turns[0], num_steps()
            while first.num_sampled < FIRST_TURN or (
                prompt % LONG_EVERY == 2 and num_steps() == train_step and first.num_sampled < LONG_TURN
            ):
                await decode(PART)
            if session.startswith("g") and prompt % LATE_EVERY == 1:
                enough = num_steps() + LATE_STEPS
                while num_steps() < enough:  # noqa: ASYNC110 - a file
                    await asyncio.sleep(0.05)
            trajectory.observe(REPLY)
        await decode(LAST_TURN)
        return trajectory.token_ids().sum() % 2

    return TurnsTask(rest, seed=seed, turns=turns)


class AgentTask(CalculatorTask):
    """An agent program that rewrites its histories at random, over HTTP; an untrained model ends turns at letters.

    Its agents have separate rewards. The solver answers in every rollout; the critic is not trained.
    """

    def __init__(self, config, *, seed):
        super().__init__(config, seed=seed)
        self.program, self.agents = self.act, {"solver": True, "critic": False}

    def chat(self, tokenizer):
        return Chat(tokenizer, end_of_turn=END_OF_TURN, stop_tokens=tuple("abcdefgh01234567"))

    async def act(self, prompt, access):
        chance = random.Random(access.api_key)
        async with over_http(access, LossyNetwork(chance), chance=chance) as answer:
            agent = RandomAgent(answer, chance=chance, max_tokens=16)
            await agent.call(agent.request(agent="solver"))
            await agent.run(chance.randint(2, 5))
        parity = len(agent.history[-1].content) % 2
        return {"policy": float(parity), "solver": chance.random(), "critic": 0.5}


def agent_task(options, *, seed):
    return AgentTask(CalculatorConfig(), seed=seed)


class TaughtTask(ParityTask):
    """Prompts of the teachers even and odd, and of none, in turn."""

    def train_prompt(self, index):
        return replace(super().train_prompt(index), teacher=("even", "odd", "")[index % 3])


def taught_task(options, *, seed):
    return TaughtTask(CalculatorConfig(**options), seed=seed)
