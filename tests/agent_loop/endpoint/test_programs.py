"""Agent programs with the clients that people use, through the endpoint and the agent loop, on a fake engine."""

import asyncio
import contextlib
import dataclasses
import json
import sys
import threading
from functools import partial

import aiohttp
import anthropic
import numpy as np
import openai
import psutil
import pytest
import torch

from agent_loop.chat import Chat
from agent_loop.engine import SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.programs.conversation import ChatRequest
from agent_loop.programs.endpoint.host import EndpointConfig, Sessions
from agent_loop.programs.endpoint.turns import turn_reader
from agent_loop.programs.program import ModelAccess, ProgramLoop, command, external
from message_queue.errors import EngineError, RolloutError, StateLostError
from message_queue.tokens import StopReason
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import END_OF_TURN, PAD, TURN_START, build_tokenizer
from tests.agent_loop.test_session import Answers, check_exact
from tests.helpers.agents import chat, message, respond
from tests.helpers.fakes import SPEC, FakeEngine, FakeReward, Interruption

TOKENIZER = build_tokenizer()
PROMPT = Prompt(index=3, messages=(Message(role="user", content="1+2"),), target={"answer": "3"})
LIMITS = TurnLimits(max_turns=8, max_tokens=400, generate_timeout_s=60.0, agent_timeout_s=120.0)
ASK = '<tool_call>{"name": "add", "arguments": {"x": 1, "y": 2}}</tool_call>'
SCRIPT = Answers(**{"tool_response": "3", "1+2": ASK})


@pytest.fixture
async def sessions():
    host = Sessions(EndpointConfig())
    yield host
    await host.close()


def make_loop(program, sessions, engine, *, reward=None, limits=LIMITS, agents=None):
    return ProgramLoop(
        program=program,
        gateway=sessions,
        engine=engine,
        chat=Chat(TOKENIZER, end_of_turn=END_OF_TURN, stop_tokens=(PAD, TURN_START)),
        read=turn_reader(TOKENIZER, family="qwen3_moe"),
        reward=reward,
        limits=limits,
        sampling=SamplingConfig(),
        agents=agents,
    )


async def roll(program, sessions, *, engine=None, **options):
    engine = engine or FakeEngine(SCRIPT)
    trajectory = Trajectory(routing=SPEC)
    loop = make_loop(program, sessions, engine, **options)
    await loop.run(PROMPT, trajectory=trajectory, session="g0-t0", cache_salt="v0")
    check_exact(trajectory, engine)
    return trajectory


async def adder(client, ask, prompt, access):
    """Adds for the model until it answers; 1 if the answer is right."""
    async with client(base_url=access.base_url, api_key=access.api_key) as opened:
        history = list(prompt.messages)
        while True:
            request = ChatRequest(messages=tuple(history), agent=access.model, max_tokens=100)
            said, _ = await ask(opened, request)
            history.append(said)
            if not said.tool_calls:
                return float(said.content == prompt.target["answer"])
            for call in said.tool_calls:
                arguments = json.loads(call.arguments)
                result = str(arguments["x"] + arguments["y"])
                history.append(Message(role="tool", content=result, tool_call_id=call.id))


with_openai = partial(adder, openai.AsyncOpenAI, chat)
with_responses = partial(adder, openai.AsyncOpenAI, respond)
with_anthropic = partial(adder, anthropic.AsyncAnthropic, message)
PROGRAMS = {"chat completions": with_openai, "responses": with_responses, "messages": with_anthropic}
each_api = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


def returning(reward):
    """A program that makes its calls and returns a reward of its own."""

    async def program(prompt, access):
        await with_openai(prompt, access)
        return reward

    return program


def session_client(access):
    return aiohttp.ClientSession(access.base_url, headers={"Authorization": f"Bearer {access.api_key}"})


@each_api
async def test_program_of_each_api_extends_one_path_and_gives_the_reward(program, sessions):
    trajectory = await roll(program, sessions)
    assert len(trajectory.paths) == 1 and len(trajectory.turns) == 2
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.STOP)
    assert trajectory.info["turns"] == 2 and trajectory.info["paths"] == 1
    text = TOKENIZER.decode(trajectory.token_ids().tolist())
    assert ASK in text and "<tool_response>\n3\n</tool_response>" in text


@each_api
async def test_program_sees_one_answer_across_new_weights(program, sessions):
    engine = FakeEngine(SCRIPT, interruptions=[Interruption(after=5, load=1), None, Interruption(after=1, load=2)])
    trajectory = await roll(program, sessions, engine=engine)
    assert trajectory.reward == 1.0 and trajectory.info["aborts"] == 2
    assert {segment.weights.version for segment in trajectory.segments} == {0, 1, 2}


async def test_reward_of_the_task_sees_the_conversation_if_the_program_gives_none(sessions):
    reward = FakeReward(value=0.5)
    trajectory = await roll(returning(None), sessions, reward=reward)
    assert trajectory.reward == 0.5
    (completion,) = reward.seen
    assert [m.role for m in completion.messages] == ["user", "assistant", "tool", "assistant"]
    assert completion.text == "3"


def planner_and_critic(returned, *, after=None):
    """A program of two agents; `after` gets the access when both have made their calls."""

    async def program(prompt, access):
        await with_openai(prompt, dataclasses.replace(access, model="planner"))
        await with_anthropic(prompt, dataclasses.replace(access, model="critic"))
        if after is not None:
            await after(access)
        return returned

    return program


BOTH = {"planner": 1.0, "critic": 0.25}


@pytest.mark.parametrize(
    ("agents", "returned", "reward", "rewards"),
    [
        ({"planner": True, "critic": True}, BOTH, 1.25, BOTH),
        ({"planner": True, "critic": True}, 0.5, 0.5, {"planner": 0.5, "critic": 0.5}),
        ({"planner": True, "critic": True}, None, 0.75, {"planner": 0.75, "critic": 0.75}),  # of the task
        ({"planner": True, "critic": False}, BOTH, 1.25, {"planner": 1.0}),
        ({"critic": False}, {"policy": 1.0}, 1.0, {"policy": 1.0}),
        ({}, BOTH, 1.25, None),
    ],
)
async def test_agents_have_rewards_of_their_own_if_they_are_trained(agents, returned, reward, rewards, sessions):
    program = planner_and_critic(returned)
    trajectory = await roll(program, sessions, agents=agents, reward=FakeReward(value=0.75))
    assert (trajectory.reward, trajectory.rewards) == (reward, rewards)
    assert [path.agent for path in trajectory.paths] == [a if a in agents else "policy" for a in ("planner", "critic")]
    if isinstance(returned, dict):
        assert {name: trajectory.info[f"reward/{name}"] for name in returned} == returned


@pytest.mark.parametrize(
    ("agents", "returned", "text"),
    [
        ({"planner": True, "critic": False}, {"planner": 1.0, "judge": 0.0}, r"'judge'.*critic, planner, policy"),
        ({"planner": True, "critic": True}, {"planner": 1.0}, "no reward for agent 'critic'"),
        ({"planner": False, "critic": False}, BOTH, "calls of critic, planner only"),
        ({"planner": True, "critic": True}, {**BOTH, "planner": float("inf")}, "is inf"),
        ({"planner": True}, {"planner": "good"}, "is 'good'"),
    ],
)
async def test_rollout_whose_agents_cannot_be_trained_fails_by_name(agents, returned, text, sessions):
    with pytest.raises(RolloutError, match=text):
        await roll(planner_and_critic(returned), sessions, agents=agents)


async def test_reward_for_an_undeclared_agent_gets_400_and_models_lists_the_agents(sessions):
    async def report(access):
        async with session_client(access) as client:
            async with client.post("/sessions/g0-t0/reward", json={"reward": {"judge": 1.0}}) as answer:
                assert answer.status == 400 and "'judge'" in await answer.text()
            async with client.post("/sessions/g0-t0/reward", json={"reward": BOTH}) as answer:
                assert answer.status == 200 and (await answer.json())["agents"] == ["critic", "planner", "policy"]
            async with client.get("/v1/models") as answer:
                assert [model["id"] for model in (await answer.json())["data"]] == ["critic", "planner", "policy"]

    trajectory = await roll(planner_and_critic(None, after=report), sessions, agents=dict.fromkeys(BOTH, True))
    assert trajectory.rewards == BOTH


async def test_late_call_and_the_key_of_another_session_are_refused(sessions):
    kept = []

    async def program(prompt, access):
        kept.append(access)
        return await with_openai(prompt, access)

    async def keep_open(prompt, access):
        with pytest.raises(openai.ConflictError):
            await with_openai(prompt, kept[0])
        with pytest.raises(openai.AuthenticationError):
            await with_openai(prompt, dataclasses.replace(access, api_key="sk-no"))
        return await with_openai(prompt, access)

    await roll(program, sessions)
    await roll(keep_open, sessions)


@pytest.mark.parametrize("reward", [np.float32(0.5), torch.tensor(0.5), {"planner": torch.tensor(0.5)}])
async def test_reward_of_a_program_is_a_number_of_any_library(reward, sessions):
    found = (await roll(returning(reward), sessions)).reward
    assert (found, type(found)) == (0.5, float)


@pytest.mark.parametrize("reward", ["0.5", b"1", np.float32("nan"), [0.5], object()])
async def test_reward_of_a_program_that_is_no_finite_number_fails_the_rollout(reward, sessions):
    with pytest.raises(RolloutError, match="rewards are finite numbers"):
        await roll(returning(reward), sessions)


async def test_program_that_is_not_async_runs_in_a_thread(sessions):
    def program(prompt, access):
        assert threading.current_thread() is not threading.main_thread()
        return asyncio.run(with_openai(prompt, access))

    assert (await roll(program, sessions)).reward == 1.0


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "KeyError"),
        ("lets out a cancel", "cancel scope 7f00"),
        ("no reward", "no reward"),
        ("no call", "no model call"),
        ("late", "agent_timeout_s"),
    ],
)
async def test_program_that_fails_is_a_failed_rollout_with_a_reason(how, text, sessions):
    async def program(prompt, access):
        if how == "no call":
            return 1.0
        await with_openai(prompt, access)
        if how == "raises":
            raise KeyError("oops")
        if how == "lets out a cancel":
            raise asyncio.CancelledError("Cancelled by cancel scope 7f00")
        if how == "late":
            await asyncio.Event().wait()

    limits = TurnLimits(max_turns=8, max_tokens=400, agent_timeout_s=0.5 if how == "late" else 10.0)
    with pytest.raises(RolloutError, match=text):
        await roll(program, sessions, limits=limits)


async def test_program_that_the_limits_cut_off_is_scored_with_stop_reason_length(sessions):
    limits = TurnLimits(max_turns=1, max_tokens=400)
    trajectory = await roll(with_openai, sessions, reward=FakeReward(value=0.25), limits=limits)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.LENGTH, 0.25)


async def test_failure_of_the_engines_ends_the_program_and_is_no_failed_rollout(sessions):
    ended = asyncio.Event()

    async def program(prompt, access):
        try:
            await with_openai(prompt, access)
        finally:
            ended.set()

    with pytest.raises(EngineError, match="no engine"):
        await roll(program, sessions, engine=FakeEngine(SCRIPT, fail=lambda _request: EngineError("no engine")))
    assert ended.is_set()


async def test_rollout_that_was_interrupted_starts_over(sessions):
    trajectory = Trajectory(routing=SPEC)
    loop = make_loop(with_openai, sessions, FakeEngine(SCRIPT))
    await loop.run(PROMPT, trajectory=trajectory, session="g0-t0", cache_salt="v0")
    with pytest.raises(StateLostError):
        await loop.run(PROMPT, trajectory=trajectory, session="g0-t0", cache_salt="v0")


async def test_agent_outside_of_the_run_opens_a_session_when_a_rollout_waits(sessions):
    rolling = asyncio.create_task(roll(external, sessions))
    headers = {"Authorization": f"Bearer {sessions.run_key}"}
    base_url = await sessions._start()
    async with aiohttp.ClientSession(base_url, headers=headers) as client:
        while True:
            async with client.post("/sessions", json={}) as answer:
                if answer.status == 201:
                    opened = await answer.json()
                    break
                assert answer.status == 429 and float(answer.headers["Retry-After"]) > 0
            await asyncio.sleep(0)
        assert opened["prompt"] == {"messages": [{"role": "user", "content": "1+2"}], "target": {"answer": "3"}}
        async with client.post("/sessions", json={}) as answer:
            assert answer.status == 429
    access = type("Access", (), {**opened, "model": "policy"})
    await with_openai(PROMPT, access)
    async with aiohttp.ClientSession(base_url, headers={"x-api-key": opened["api_key"]}) as client:
        await client.post(f"/sessions/{opened['id']}/reward", json={"reward": 0.25})
        await client.post(f"/sessions/{opened['id']}/end", json={})
    assert (await rolling).reward == 0.25


# ---- programs in separate processes

CALL = """
import json, os, sys
import openai
prompt = json.load(sys.stdin)
client = openai.OpenAI()
answer = client.chat.completions.create(model=os.environ["MODEL"], messages=prompt["messages"])
assert answer.choices[0].message.tool_calls
"""


def agent_program(folder, end):
    (folder / "agent.py").write_text(CALL + end)
    return command(sys.executable, str(folder / "agent.py"))


@pytest.mark.parametrize(("end", "reward"), [("print('done')\nprint(0.75)", 0.75), ("print('done')", 0.5)])
async def test_command_makes_calls_and_may_print_the_reward(end, reward, sessions, tmp_path):
    trajectory = await roll(agent_program(tmp_path, end), sessions, reward=FakeReward(value=0.5))
    assert trajectory.reward == reward and trajectory.info["turns"] == 1


async def test_command_that_fails_names_its_error(sessions, tmp_path):
    with pytest.raises(RolloutError, match="KeyError: 'oops'"):
        await roll(agent_program(tmp_path, "raise KeyError('oops')"), sessions)


ACCESS = ModelAccess(base_url="http://localhost", api_key="k", model="policy")


@pytest.mark.parametrize("start", ["", "setsid"])
async def test_command_is_not_waited_for_by_other_holders_of_its_output(start, tmp_path):
    run = command("sh", "-c", f"{start} sleep 1000 & echo $! > {tmp_path}/pid; cat > /dev/null; echo said; echo 0.75")
    try:
        assert await asyncio.wait_for(run(PROMPT, ACCESS), 60) == 0.75
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int((tmp_path / "pid").read_text())).kill()


async def test_command_that_does_not_read_its_prompt_ends():
    prompt = dataclasses.replace(PROMPT, target={"long": "x" * 1_000_000})
    assert await asyncio.wait_for(command("echo", "1.5")(prompt, ACCESS), 60) == 1.5


async def test_command_ends_with_all_that_it_started(sessions, tmp_path):
    noted = tmp_path / "pid"
    start = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n"
        f"print(child.pid, file=open({str(noted)!r}, 'w'), flush=True)\nchild.wait()\n"
    )
    rolling = asyncio.create_task(roll(agent_program(tmp_path, start), sessions))
    while not (noted.exists() and noted.read_text().endswith("\n")):
        await asyncio.wait([rolling], timeout=0.01)
        assert not rolling.done()
    child = psutil.Process(int(noted.read_text()))
    rolling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rolling
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
