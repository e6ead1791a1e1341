"""Multi-turn rollouts at their edges: whatever happens, tokens, loss mask, logprobs, versions and rows stay aligned."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from agent_loop.chat import Chat
from agent_loop.engine import SamplingConfig
from agent_loop.loop import TurnLimits
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools import PauseGate, ToolError, ToolRunner, describe_tool
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.inference.router import ReplicaRouter
from async_rl.rollout.rollouter import Rollouter
from async_rl.rollout.validator import Validator
from async_rl.weights.transport import WeightUpdate
from message_queue.queue import Admission
from message_queue.tokens import StopReason
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import END_OF_TURN, PAD, TURN_START
from tests.agent_loop.test_loops import (
    ANSWER,
    CALL,
    LIMITS,
    PROMPT,
    TOKENIZER,
    ids,
    make_engine,
    make_loop,
    text_of,
    turn,
)
from tests.helpers.dense import behaviour_logprobs, loss_mask, param_versions
from tests.helpers.fakes import (
    SPEC,
    FakeReward,
    FakeTool,
    Interruption,
    fake_logprob,
    fake_weights,
    true_rows,
)
from tests.helpers.fakes.rollouts import RolloutsHere
from tests.helpers.faults import FAULTS

MODES = ["resume", "keep", "drain"]
ROOMY = TurnLimits(max_turns=6, max_tokens=500, tool_timeout_s=1.0, generate_timeout_s=5.0)


def check_aligned(trajectory, *, engine=None):
    """Every array against the slow model of it."""
    tokens, mask = trajectory.token_ids(), loss_mask(trajectory)
    versions, logprobs = param_versions(trajectory), behaviour_logprobs(trajectory)
    assert len(tokens) == len(mask) == len(versions) == len(logprobs) == len(trajectory)
    assert ((versions >= 0) == mask).all()
    for at, token in enumerate(tokens):
        expected = fake_logprob(int(token), at, int(versions[at])) if mask[at] else 0.0
        assert logprobs[at] == pytest.approx(expected)
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()
    received = sum(len(s.routed_experts.experts) for s in trajectory.segments)
    assert received == trajectory.num_rows  # each row came once
    sampled = np.flatnonzero(mask)
    assert trajectory.num_rows == (sampled[-1] if len(sampled) else 0)


async def roll(engine, *, resume_routing="append", **options):
    trajectory = Trajectory(routing=SPEC, resume_routing=resume_routing)
    await make_loop(engine, **options).run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")
    check_aligned(trajectory)
    return trajectory


def update(version):
    return WeightUpdate(path=Path(f"weights-{version}.safetensors"), weights=fake_weights(version))


# ---- tool replies


async def test_a_tool_error_is_shown_and_not_trained():
    def wrong(_):
        raise ToolError("x must be even")

    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER)), tool=FakeTool(behave=wrong), limits=ROOMY)
    assert "error: x must be even" in text_of(trajectory)
    sampled = TOKENIZER.decode(trajectory.token_ids()[loss_mask(trajectory)].tolist())
    assert sampled == turn(CALL) + turn(ANSWER)


async def test_a_long_tool_reply_is_cut_and_counted():
    limits = TurnLimits(max_turns=6, max_tokens=500, max_tool_reply_chars=8)
    tool = FakeTool(behave=lambda _: "0123456789abc")
    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER)), tool=tool, limits=limits)
    assert "<tool_response>\n01234567... (5 more characters left out)\n</tool_response>" in text_of(trajectory)
    assert (trajectory.info["truncated_replies"], trajectory.info["tool_errors"]) == (1, 0)


async def test_a_tool_reply_that_leaves_no_room_to_answer_is_left_out():
    tool = FakeTool(behave=lambda _: "9" * 400)
    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER)), tool=tool)
    assert (trajectory.stop_reason, len(tool.calls)) == (StopReason.LENGTH, 1)
    assert text_of(trajectory).endswith(turn(CALL))
    assert trajectory.num_rows == len(trajectory) - 1


async def test_a_tool_reply_that_leaves_room_for_one_token_is_followed_by_one():
    roomy = await roll(make_engine(turn(CALL), turn(ANSWER)), limits=ROOMY)
    exact = len(roomy) - len(ids(turn(ANSWER))) + 1
    limits = TurnLimits(max_turns=6, max_tokens=exact)
    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER)), limits=limits)
    assert (trajectory.stop_reason, len(trajectory), len(trajectory.turns)) == (StopReason.LENGTH, exact, 2)


async def test_a_budget_that_ends_inside_a_tool_call_executes_nothing():
    tool = FakeTool()
    limits = TurnLimits(max_turns=6, max_tokens=500, max_new_tokens_per_turn=len(ids(CALL)) - 1)
    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER)), tool=tool, limits=limits)
    assert (trajectory.stop_reason, tool.calls) == (StopReason.LENGTH, [])


async def test_a_budget_that_ends_in_the_turn_after_a_tool_keeps_the_reply_out_of_the_loss():
    limits = TurnLimits(max_turns=6, max_tokens=500, max_new_tokens_per_turn=len(ids(turn(CALL))))
    answer = "<answer>" + "4" * 60 + "</answer>"
    trajectory = await roll(make_engine(turn(CALL), turn(answer)), limits=limits)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.LENGTH, 2)
    assert trajectory.num_sampled == 2 * len(ids(turn(CALL)))


# ---- turns without words


async def test_a_turn_whose_first_token_ends_it_has_that_token_only():
    trajectory = await roll(make_engine(END_OF_TURN))
    assert (trajectory.num_sampled, trajectory.stop_reason) == (1, StopReason.STOP)


async def test_a_second_turn_whose_first_token_ends_it_follows_the_tool():
    trajectory = await roll(make_engine(turn(CALL), END_OF_TURN))
    assert [len(t.segments) for t in trajectory.turns] == [1, 1]
    assert len(trajectory.turns[1].segments[0]) == 1


async def test_a_second_turn_of_no_token_at_all_leaves_its_observation_without_rows():
    whole = await roll(make_engine(turn(CALL), turn(ANSWER)))
    context = len(whole) - len(ids(turn(ANSWER)))
    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER), context_length=context))
    assert (trajectory.stop_reason, [len(t.segments) for t in trajectory.turns]) == (StopReason.LENGTH, [1, 0])
    assert (len(trajectory), trajectory.num_rows) == (
        context,
        len(trajectory.turns[0].observation) + len(ids(turn(CALL))) - 1,
    )


# ---- stop strings


def stop_string_loop(engine, tool, *, stop_strings, limits=ROOMY):
    return ToolUseLoop(
        engine=engine,
        chat=Chat(
            TOKENIZER,
            end_of_turn=END_OF_TURN,
            tools=[describe_tool(tool)],
            stop_tokens=(PAD, TURN_START),
            stop_strings=stop_strings,
        ),
        tools=ToolRunner([tool], timeout_s=1.0),
        reward=FakeReward(),
        limits=limits,
        sampling=SamplingConfig(),
    )


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_stop_string_inside_a_token_ends_the_turn_and_its_call_is_executed(interrupted):
    tool, trajectory = FakeTool(behave=lambda _: "42"), Trajectory(routing=SPEC)
    spoken = f"{CALL} and now I make up a reply: 43"
    schedule = [Interruption(after=n, load=n) for n in (3, 4, 5)] if interrupted else ()
    engine = make_engine(turn(spoken), turn(ANSWER), interruptions=schedule)
    loop = stop_string_loop(engine, tool, stop_strings=("</tool_call> and",))
    await loop.run(PROMPT, trajectory=trajectory, session="s", cache_salt="")
    check_aligned(trajectory)
    assert len(tool.calls) == 1
    written = TOKENIZER.decode(trajectory.token_ids()[loss_mask(trajectory)].tolist())
    assert written == f"{CALL} and{turn(ANSWER)}"
    assert f"and{END_OF_TURN}\n<|im_start|>user\n<tool_response>\n42" in text_of(trajectory)
    assert trajectory.stop_reason is StopReason.STOP


async def test_a_stop_string_without_a_call_ends_the_trajectory():
    tool, trajectory = FakeTool(), Trajectory(routing=SPEC)
    loop = stop_string_loop(make_engine(turn(ANSWER + " more")), tool, stop_strings=("</answer>",))
    await loop.run(PROMPT, trajectory=trajectory, session="s", cache_salt="")
    check_aligned(trajectory)
    assert text_of(trajectory).endswith(ANSWER)
    assert (trajectory.stop_reason, tool.calls) == (StopReason.STOP, [])


# ---- interruptions


WORDS = len(ids(turn(CALL))), len(ids(turn(ANSWER)))
POSITIONS = [(0, at) for at in range(WORDS[0] + 1)] + [(1, at) for at in range(WORDS[1] + 1)]


@pytest.mark.parametrize("resume_routing", ["append", "force"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["abort", "in flight"])
async def test_interrupted_at_every_position_of_every_turn_the_trajectory_is_the_uninterrupted_one(
    goes_on, resume_routing
):
    plain = await roll(make_engine(turn(CALL), turn(ANSWER)))
    for number, at in POSITIONS:
        tool = FakeTool(behave=lambda _: "42")
        schedule = [*[None] * number, Interruption(after=at, load=1, goes_on=goes_on)]
        engine = make_engine(turn(CALL), turn(ANSWER), interruptions=schedule)
        trajectory = await roll(engine, tool=tool, resume_routing=resume_routing)
        assert trajectory.token_ids().tolist() != [] and len(tool.calls) == 1
        assert TOKENIZER.decode(trajectory.token_ids()[loss_mask(trajectory)].tolist()) == turn(CALL) + turn(ANSWER)
        old = at + number * WORDS[0]  # the stop token ends a turn before its interruption can come
        reached = at < WORDS[number]
        expected = [0] * old + [1] * (sum(WORDS) - old) if reached else [0] * sum(WORDS)
        assert param_versions(trajectory)[loss_mask(trajectory)].tolist() == expected
        assert loss_mask(trajectory).sum() == loss_mask(plain).sum()


@pytest.mark.parametrize("on_update", MODES)
async def test_an_update_while_a_tool_runs_neither_repeats_nor_loses_it(on_update):
    engine, tool, gate = (
        make_engine(turn(CALL), turn(ANSWER)),
        FakeTool(behave=lambda _: "42", seconds=0.03),
        PauseGate(),
    )
    publisher = Publisher([engine], on_update=on_update, rollouts=RolloutsHere(gate), timeout_s=1.0)
    rollout = asyncio.create_task(roll(engine, tool=tool, gate=gate))
    await tool.started.wait()
    await publisher.publish(update(1))
    trajectory = await rollout
    assert (len(tool.calls), trajectory.info["aborts"]) == (1, 0)
    assert [s.weights.version for s in trajectory.segments] == [0, 1]


@pytest.mark.parametrize("on_update", MODES)
async def test_updates_while_it_decodes_leave_the_words_and_split_the_versions(on_update):
    engine, gate = make_engine(turn(CALL), turn(ANSWER), token_s=0.0005), PauseGate()
    publisher = Publisher([engine], on_update=on_update, rollouts=RolloutsHere(gate), timeout_s=5.0)
    rollout = asyncio.create_task(roll(engine, gate=gate))
    reports = []
    for version in range(1, 5):
        await asyncio.sleep(0.006)
        reports.append(await publisher.publish(update(version)))
    trajectory = await rollout
    assert TOKENIZER.decode(trajectory.token_ids()[loss_mask(trajectory)].tolist()) == turn(CALL) + turn(ANSWER)
    versions = param_versions(trajectory)[loss_mask(trajectory)]
    assert (np.diff(versions) >= 0).all()
    if on_update == "resume":
        assert trajectory.info["aborts"] == sum(r.aborted for r in reports) > 0
    else:
        assert trajectory.info["aborts"] == 0
    if on_update == "keep":
        assert sum(r.frozen for r in reports) > 0
        assert len(trajectory.segments) > len(engine.requests) == 2
    if on_update == "drain":
        assert len(trajectory.segments) == len(engine.requests) == 2


async def test_frozen_decodes_can_still_be_aborted_and_resumed():
    engine = make_engine(turn(CALL), turn(ANSWER), token_s=0.0005)
    rollout = asyncio.create_task(roll(engine))
    await asyncio.sleep(0.01)
    await engine.pause()
    assert await engine.freeze() == 1
    tokens = engine.in_flight
    await asyncio.sleep(0.01)
    assert (engine.in_flight, await engine.abort()) == (tokens, 1)
    await engine.load(fake_weights(1))
    await engine.resume()
    trajectory = await rollout
    assert trajectory.info["aborts"] == 1
    assert param_versions(trajectory).max() == 1


@pytest.mark.parametrize("name", FAULTS)
async def test_a_bad_answer_in_a_later_turn_repeats_no_tool(name):
    tool = FakeTool(behave=lambda _: "42")
    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER), faults=[None, FAULTS[name]]), tool=tool)
    assert (len(tool.calls), trajectory.info["refused_answers"]) == (1, 1)
    assert text_of(trajectory).endswith(turn(ANSWER))


@pytest.mark.parametrize("after", range(0, 60, 3))
async def test_a_replica_that_dies_anywhere_loses_nothing_of_a_conversation(after):
    first, second = (make_engine(turn(CALL), turn(ANSWER), name=f"fake-{i}") for i in range(2))
    tool = FakeTool(behave=lambda _: "42")
    rollout = asyncio.create_task(roll(ReplicaRouter([first, second]), tool=tool))
    for _ in range(after):
        await asyncio.sleep(0)
    first.die()
    trajectory = await rollout
    assert len(tool.calls) == 1
    assert TOKENIZER.decode(trajectory.token_ids()[loss_mask(trajectory)].tolist()) == turn(CALL) + turn(ANSWER)


# ---- n per prompt


@pytest.mark.parametrize("resume_routing", ["append", "force", "replace", "split"])
async def test_n_rollouts_of_a_prompt_share_engines_and_nothing_else(resume_routing):
    engines = [make_engine(turn(CALL), turn(ANSWER), name=f"fake-{i}", token_s=0.0005) for i in range(2)]
    pool, gate = ReplicaPool(engines), PauseGate()
    tool = FakeTool(behave=lambda _: "42", seconds=0.002)
    rollouter = Rollouter(
        loop=make_loop(ReplicaRouter(pool), tool=tool, gate=gate),
        routing=SPEC,
        trajectories_per_group=6,
        resume_routing=resume_routing,
    )
    publisher = Publisher(pool, on_update="resume", rollouts=RolloutsHere(gate), timeout_s=5.0)
    admission = Admission(group=3, prompt=0, admitted_version=0, admitted_update=0)
    rolling = asyncio.create_task(rollouter.roll(PROMPT, admission))
    await asyncio.sleep(0.01)
    await publisher.publish(update(1))
    group = await rolling
    assert group.closed and len(tool.calls) == len(group.trajectories) == 6
    assert {t.resume_routing for t in group.trajectories} == {resume_routing}
    sessions = {r.session for engine in engines for r in engine.requests}
    assert sessions == {f"g3-t{i}" for i in range(6)}
    assert any(t.info["aborts"] for t in group.trajectories)
    for trajectory in group.trajectories:
        if resume_routing in ("append", "force"):
            check_aligned(trajectory)
        assert (trajectory.sequences()[-1].routed_experts[:-1] >= 0).all()


async def test_validation_merges_rows_as_training_does():
    engine = make_engine(turn(ANSWER), interruptions=[Interruption(after=2)])
    validator = Validator(loop=make_loop(engine, limits=LIMITS), routing=SPEC, resume_routing="force")
    assert (await validator.run([(0, PROMPT)], number=1)).rewards == [1.0]
    assert engine.requests[1].forced_experts is not None
