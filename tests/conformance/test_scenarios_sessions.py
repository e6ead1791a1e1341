"""Agents over HTTP that rewrite their histories, under lost calls, publishes, aborts and killed engines.

What is trained is what a tap at the engines saw. In the environment:

    SESSIONS=500 FIRST=1000    sessions 1000 to 1499; a dozen without it
    KILLS=5                    so many times processes of engines are killed; without it twice, and of the fake alone
"""

import asyncio
import os
import random
import time
from collections import Counter

import pytest
import pytest_asyncio

from agent_loop.chat import Chat
from agent_loop.engine import SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.programs.endpoint.host import EndpointConfig, Sessions
from agent_loop.programs.endpoint.turns import turn_reader
from agent_loop.programs.program import ProgramLoop
from async_rl.inference.sglang.engine import start_sglang
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import END_OF_TURN, build_tokenizer
from tests.conformance.checks import assert_true, sampled_of
from tests.conformance.engines import MARKS, VOCAB
from tests.conformance.probes import CountingScript
from tests.conformance.served import VLLM, fake_under_test, start_vllm, under_test
from tests.conformance.sglang_support import config as sglang_config
from tests.conformance.tapped import TappedPool, taken_of
from tests.helpers.agents import LossyNetwork, RandomAgent, over_http
from tests.helpers.fakes import FakeEngine

pytestmark = MARKS
SESSIONS, FIRST = int(os.environ.get("SESSIONS", "12")), int(os.environ.get("FIRST", "0"))
KILLS = os.environ.get("KILLS")
REPLICAS = 2  # if engines are killed
AT_ONCE = 32
TOKENIZER = build_tokenizer()
READ = turn_reader(TOKENIZER, family="qwen3_moe")
LETTERS = tuple("abcdefgh") + tuple("01234567")
CHAT = Chat(TOKENIZER, end_of_turn=END_OF_TURN, stop_tokens=LETTERS)  # an untrained model ends few turns by itself
PROMPT = Prompt(index=0, messages=(Message(role="user", content="1+2"),), target={})
LIMITS = TurnLimits(max_turns=40, max_tokens=400, max_refused_answers=0)
NEW_PATHS = ("edit", "compact", "ask_sub_agent", "ask_twice")


@pytest.fixture(params=["fake", "vllm", "sglang"])
def found(request):
    """Name of an engine, its models, and the replica of the package if none is killed."""
    name, value = request.param, request.getfixturevalue
    if name == "fake":
        return name, None, None
    models = value("models" if name == "vllm" else "sglang_models")
    value("environment")
    return name, models, None if KILLS else value("engine" if name == "vllm" else "sglang_server")


@pytest_asyncio.fixture(loop_scope="package")
async def replicas(found, monkeypatch):
    """Replicas that serve version 0."""
    engine, models, shared = found

    async def start(name):
        if models is None:
            return FakeEngine(CountingScript(vocab_size=VOCAB), name=name)
        if engine == "vllm":
            return await start_vllm(VLLM, name=name, checkpoint=models.paths[0])
        return await start_sglang(sglang_config(), name=name, checkpoint=models.paths[0])

    own = [] if shared else [await start(f"replica-{number}") for number in range(REPLICAS)]
    tested = fake_under_test() if models is None else under_test(shared or own[0], models, patch=monkeypatch)
    pool = TappedPool(tested, own or [shared], start=start)
    await pool.publish()
    yield pool
    if own:
        await pool.close()


class Rollout:
    """A rollout and its agent, whose seed is `number`."""

    def __init__(self, number, *, replicas, sessions):
        self.name = f"session-{number}"
        self.trajectory = Trajectory(
            routing=replicas.tested.routing, resume_routing="append" if number % 2 else "force"
        )
        self.network = LossyNetwork(random.Random(f"network of {self.name}"))
        self.agent: RandomAgent
        self._loop = ProgramLoop(
            program=self._act,
            gateway=sessions,
            engine=replicas.engine,
            chat=CHAT,
            read=READ,
            reward=None,
            limits=LIMITS,
            sampling=SamplingConfig(),
        )

    async def run(self):
        await self._loop.run(PROMPT, trajectory=self.trajectory, session=self.name, cache_salt=self.name)

    async def _act(self, prompt, access):
        chance = random.Random(self.name)
        async with over_http(access, self.network, chance=random.Random(f"API of {self.name}")) as answer:
            self.agent = RandomAgent(answer, chance=chance, max_tokens=24)
            await self.agent.run(chance.randint(2, 6))
        return 1.0

    def check(self, answered):
        """As `taken_of`; also each call was sampled once, and only rewritten or cut conversations made new paths."""
        exchanges = taken_of(self.trajectory, name=self.name, answered=answered)
        info, acts = self.trajectory.info, Counter(self.agent.acts)
        assert info["paths"] <= 1 + sum(acts[act] for act in NEW_PATHS) + self.agent.cut
        if acts["ask_twice"]:  # a retry may get the answer of the equal call next to it
            assert info["turns"] <= self.agent.calls
        else:
            assert info["turns"] == self.agent.calls
        return exchanges


async def test_sessions_train_what_the_engines_saw(replicas, found, report):
    kills = int(KILLS or 2 * (found[0] == "fake"))
    due = {(2 * kill + 1) * SESSIONS // (2 * kills) for kill in range(kills)}
    sums, started, chance = Counter[str](), time.monotonic(), random.Random(f"disturbances {FIRST}")
    numbers, sessions = iter(range(FIRST, FIRST + SESSIONS)), Sessions(EndpointConfig())

    async def roll():
        for number in numbers:
            rollout = Rollout(number, replicas=replicas, sessions=sessions)
            await rollout.run()
            exchanges = rollout.check(replicas.answered)
            assert_true(replicas.tested, exchanges)
            sums.update({f"act {act}": count for act, count in Counter(rollout.agent.acts).items()})
            sums.update({name: int(rollout.trajectory.info[name]) for name in ("turns", "paths", "retries", "aborts")})
            sums["tokens"] += sum(map(sampled_of, exchanges))
            sums["lost"] += rollout.network.lost
            sums["replaced"] += sum(segment.replica not in names for e in exchanges for segment in e.answer)
            sums["sessions"] += 1
            if sums["sessions"] in due:
                await replicas.kill(chance)

    names = {member.name for member in replicas.pool.members}
    async with asyncio.TaskGroup() as tasks:
        disturbing = tasks.create_task(replicas.disturb(chance))
        await asyncio.gather(*(tasks.create_task(roll()) for _ in range(AT_ONCE)))
        await replicas.until_whole()
        disturbing.cancel()
    await sessions.close()
    report(f"{found[0]}: {dict(sums | replicas.counts)} in {time.monotonic() - started:.0f} s")
    assert not replicas.answered, "every answer is of a path"
    assert sum(name.startswith("act ") for name in sums) == 7
    assert min(sums["retries"], sums["aborts"]) > 0 and sums["paths"] > 2 * SESSIONS
    assert replicas.counts["publishes"] > 1 and replicas.counts["kills"] >= kills
    assert not kills or sums["replaced"]
