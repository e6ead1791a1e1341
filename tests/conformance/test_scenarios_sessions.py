"""Sessions of agents that rewrite their histories, under publishes and aborts: what is trained is what the engine saw.

SESSIONS=2000 in the environment makes as many; the default is a few.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

from agent_loop.chat import Chat
from agent_loop.engine import SamplingConfig
from agent_loop.loop import TurnLimits
from agent_loop.session import AgentSession
from async_rl.endpoint.turns import turn_reader
from message_queue.tokens import StopReason
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import END_OF_TURN, build_tokenizer
from tests.conformance.checks import assert_true, versions_of
from tests.conformance.engines import MARKS, TIMEOUT_S, EngineUnderTest
from tests.helpers.agents import RandomAgent

pytestmark = MARKS
SESSIONS = int(os.environ.get("SESSIONS", "12"))
AT_ONCE = 12
TOKENIZER = build_tokenizer()
READ = turn_reader(TOKENIZER, family="qwen3_moe")
LETTERS = tuple("abcdefgh") + tuple("01234567")
CHAT = Chat(TOKENIZER, end_of_turn=END_OF_TURN, stop_tokens=LETTERS)  # an untrained model ends few turns by itself
LIMITS = TurnLimits(max_turns=40, max_tokens=400, generate_timeout_s=TIMEOUT_S, max_refused_answers=0)


class Rollout:
    """A session and its agent."""

    def __init__(self, tested: EngineUnderTest, number: int) -> None:
        self.name = f"session-{number}"
        self.chance = random.Random(self.name)
        self.trajectory = Trajectory(routing=tested.routing, resume_routing=self.chance.choice(["append", "force"]))
        self.session = AgentSession(
            self.trajectory,
            engine=tested,
            chat=CHAT,
            read=READ,
            limits=LIMITS,
            sampling=SamplingConfig(),
            name=self.name,
            cache_salt=self.name,
        )
        self.agent = RandomAgent(self.session.answer, chance=self.chance, max_tokens=24)

    async def run(self) -> None:
        await self.agent.run(self.chance.randint(2, 6))
        await self.session.close()
        assert self.session.failure is None
        self.trajectory.close(stop_reason=self.session.stop_reason or StopReason.STOP, reward=1.0)


def check_against_the_tap(tested: EngineUnderTest, rollout: Rollout) -> None:
    """Each sequence equals what the engine was sent and answered, and each token that it sampled is in one loss."""
    sampled = Counter[tuple[int, ...]]()
    names = {f"{rollout.name}-p{path.path}" for path in rollout.trajectory.paths[1:]} | {rollout.name}
    for exchange in [exchange for name in sorted(names) for exchange in tested.of_session(name)]:
        tokens = exchange.request.token_ids.tolist()
        for segment in exchange.answer:
            for token in segment.token_ids.tolist():
                tokens.append(token)
                sampled[tuple(tokens)] += 1  # a prefix that ends with a sampled token
    trained = Counter[tuple[int, ...]]()
    for sequence in rollout.trajectory.sequences():
        tokens = sequence.token_ids.tolist()
        for run in sequence.runs:
            trained.update(tuple(tokens[: at + 1]) for at in range(run.start, run.start + run.tokens))
        assert sequence.rows is not None and len(sequence.rows) == len(tokens) - 1
    assert trained == sampled


async def test_sessions_train_what_the_engine_saw_under_publishes_and_aborts(tested: EngineUnderTest):
    rollouts: list[Rollout] = []
    acts = Counter[str]()
    chance = random.Random("sessions")
    while len(rollouts) < SESSIONS:
        started = [Rollout(tested, len(rollouts) + i) for i in range(min(AT_ONCE, SESSIONS - len(rollouts)))]
        tasks = [tested.start(rollout.run()) for rollout in started]
        while running := [task for task in tasks if not task.done()]:
            await asyncio.wait(running, timeout=chance.uniform(0.1, 1.0))
            if chance.random() < 0.3:
                await tested.replica.abort()
            if chance.random() < 0.2:
                await tested.publish("resume", stays_slow=chance.random() < 0.3)
        await asyncio.gather(*tasks)
        await tested.full_speed()
        for rollout in started:
            check_against_the_tap(tested, rollout)
            acts.update(rollout.agent.acts)
        assert_true(tested, tested.exchanges)
        rollouts += started
    assert len(acts) == 7, "every way to act"
    assert sum(len(rollout.trajectory.paths) for rollout in rollouts) > 2 * len(rollouts)
    assert any(len(set(versions_of(exchange))) == 1 for exchange in tested.exchanges)
