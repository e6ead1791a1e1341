import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.chat import Chat
from agent_loop.engine import EngineError, SamplingConfig
from agent_loop.loop import Message, Prompt, PromptError, RolloutError, TurnLimits
from agent_loop.reward import RewardError
from agent_loop.single_turn import SingleTurnLoop
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools import PauseGate, ToolRunner, describe_tool
from message_queue.tokens import ContractError, StopReason
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import END_OF_TURN, PAD, TURN_START, build_tokenizer
from tests.helpers.dense import loss_mask, row_versions
from tests.helpers.fakes import (
    SPEC,
    FakeEngine,
    FakeReward,
    FakeTool,
    Interruption,
    TurnScript,
    fake_weights,
    true_rows,
)

TOKENIZER = build_tokenizer()
PROMPT = Prompt(index=0, messages=(Message(role="user", content="6*7="),))
CALL = '<tool_call>\n{"name": "tool", "arguments": {"x": 1}}\n</tool_call>'
ANSWER = "<answer>42</answer>"
LIMITS = TurnLimits(max_turns=6, max_tokens=224, tool_timeout_s=1.0, generate_timeout_s=5.0)


UNDISTURBED = {"aborts": 0, "refused_answers": 0}


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def make_engine(*turns, **options):
    return FakeEngine(TurnScript([ids(turn) for turn in turns], opening=ids("<|im_start|>assistant\n")), **options)


def make_loop(engine, *, tool=None, reward=None, limits=LIMITS, gate=None):
    tool = tool or FakeTool(behave=lambda _: "42")
    return ToolUseLoop(
        engine=engine,
        chat=Chat(TOKENIZER, end_of_turn=END_OF_TURN, tools=[describe_tool(tool)], stop_tokens=(PAD, TURN_START)),
        tools=ToolRunner([tool], timeout_s=limits.tool_timeout_s, gate=gate),
        reward=reward or FakeReward(),
        limits=limits,
        sampling=SamplingConfig(),
    )


async def roll(engine, **options):
    trajectory = Trajectory(routing=SPEC)
    await make_loop(engine, **options).run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")
    return trajectory


def text_of(trajectory):
    return TOKENIZER.decode(trajectory.token_ids().tolist())


def turn(text):
    return text + END_OF_TURN


# ---- the conversation


async def test_a_call_is_executed_and_its_reply_shown_then_the_answer_ends_the_trajectory():
    reward = FakeReward(value=0.5)
    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER)), reward=reward)
    assert text_of(trajectory) == (
        f"<|im_start|>user\n6*7=<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{ANSWER}<|im_end|>"
    )
    sampled = trajectory.token_ids()[loss_mask(trajectory)].tolist()
    assert sampled == ids(turn(CALL)) + ids(turn(ANSWER))
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.STOP, 0.5)
    assert trajectory.info == {"turns": 2, "tool_calls": 1, "tool_errors": 0, "truncated_replies": 0} | UNDISTURBED
    assert reward.seen[0].turns == (CALL, ANSWER)
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()


async def test_malformed_calls_and_failing_tools_come_back_to_the_model_and_are_counted():
    def fail(_):
        raise OSError("down")

    engine = make_engine(turn("<tool_call>{</tool_call>"), turn(CALL + CALL), turn(ANSWER))
    limits = TurnLimits(max_turns=6, max_tokens=400)
    trajectory = await roll(engine, tool=FakeTool(behave=fail), limits=limits)
    assert trajectory.info == {"turns": 3, "tool_calls": 3, "tool_errors": 3, "truncated_replies": 0} | UNDISTURBED
    assert text_of(trajectory).count("<tool_response>\nerror: ") == 3
    assert trajectory.stop_reason is StopReason.STOP


async def test_a_tool_that_takes_too_long_does_not_end_the_rollout():
    limits = TurnLimits(max_turns=6, max_tokens=224, tool_timeout_s=0.01)
    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER)), tool=FakeTool(seconds=30), limits=limits)
    assert "gave no answer in 0.01 s" in text_of(trajectory)
    assert (trajectory.stop_reason, trajectory.info["tool_errors"]) == (StopReason.STOP, 1)


async def test_one_loop_serves_many_rollouts_at_once():
    engine, tool = make_engine(turn(CALL), turn(ANSWER)), FakeTool(behave=lambda _: "42", seconds=0.001)
    loop, trajectories = make_loop(engine, tool=tool), [Trajectory(routing=SPEC) for _ in range(50)]
    async with asyncio.TaskGroup() as rollouts:
        for i, trajectory in enumerate(trajectories):
            rollouts.create_task(loop.run(PROMPT, trajectory=trajectory, session=f"g0-t{i}", cache_salt="v0"))
    assert len({text_of(t) for t in trajectories}) == 1
    assert len(tool.calls) == 50


# ---- limits


async def test_the_calls_of_the_last_turn_are_not_executed():
    tool = FakeTool()
    limits = TurnLimits(max_turns=2, max_tokens=224)
    trajectory = await roll(make_engine(turn(CALL), turn(CALL)), tool=tool, limits=limits)
    assert trajectory.stop_reason is StopReason.TOOL_CALL
    assert (len(tool.calls), trajectory.info["turns"]) == (1, 2)


async def test_a_turn_cut_off_by_its_own_limit_ends_the_trajectory():
    tool, reward = FakeTool(), FakeReward(value=0.0)
    limits = TurnLimits(max_turns=6, max_tokens=224, max_new_tokens_per_turn=3)
    trajectory = await roll(make_engine(turn(CALL)), tool=tool, reward=reward, limits=limits)
    assert (trajectory.stop_reason, trajectory.num_sampled, tool.calls) == (StopReason.LENGTH, 3, [])
    assert reward.seen[0].stop_reason is StopReason.LENGTH


@settings(deadline=None)
@given(max_tokens=st.integers(14, 70))
def test_no_trajectory_is_longer_than_its_limit_and_none_ends_with_a_reply(max_tokens):
    engine = make_engine(turn(CALL), turn(ANSWER))
    trajectory = asyncio.run(roll(engine, limits=TurnLimits(max_turns=6, max_tokens=max_tokens)))
    assert len(trajectory) <= max_tokens
    assert loss_mask(trajectory)[-1]
    assert trajectory.num_rows == len(trajectory) - 1


async def test_a_reply_that_leaves_no_room_to_answer_is_not_appended():
    full = len(ids(f"<|im_start|>user\n6*7=<|im_end|>\n<|im_start|>assistant\n{turn(CALL)}"))
    tool = FakeTool(behave=lambda _: "42")
    limits = TurnLimits(max_turns=6, max_tokens=full + 10)
    trajectory = await roll(make_engine(turn(CALL), turn(ANSWER)), tool=tool, limits=limits)
    assert (trajectory.stop_reason, len(trajectory), len(tool.calls)) == (StopReason.LENGTH, full, 1)
    assert trajectory.info["tool_calls"] == 1


async def test_a_prompt_that_does_not_fit_fails_before_any_request():
    engine = make_engine()
    with pytest.raises(PromptError, match="prompt 0 has 12 tokens"):
        await roll(engine, limits=TurnLimits(max_turns=6, max_tokens=12))
    assert engine.requests == []


async def test_a_call_that_ends_with_another_stop_token_is_not_executed():
    tool = FakeTool()
    trajectory = await roll(make_engine(CALL + PAD), tool=tool)
    assert (trajectory.stop_reason, tool.calls) == (StopReason.STOP, [])


async def test_an_empty_generation_is_an_empty_turn():
    reward = FakeReward(value=0.0)
    trajectory = await roll(make_engine(END_OF_TURN), reward=reward)
    assert (trajectory.stop_reason, reward.seen[0].turns) == (StopReason.STOP, ("",))


# ---- interruptions


@settings(deadline=None)
@given(
    schedule=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 2)), max_size=10),
    max_tokens=st.sampled_from([40, 60, 75, 224]),
)
def test_whatever_is_interrupted_tools_run_once_and_the_trajectory_is_the_uninterrupted_one(schedule, max_tokens):
    turns = (turn(CALL), turn("<tool_call>{"), turn(CALL + CALL), turn(ANSWER))
    limits = TurnLimits(max_turns=6, max_tokens=max_tokens)
    version, interruptions = 0, []
    for after, publishes in schedule:
        version += publishes
        interruptions.append(Interruption(after=after, load=version))

    async def both():
        once, again = FakeTool(behave=lambda _: "42"), FakeTool(behave=lambda _: "42")
        plain = await roll(make_engine(*turns), tool=once, limits=limits)
        broken = await roll(make_engine(*turns, interruptions=interruptions), tool=again, limits=limits)
        return plain, broken, once, again

    plain, broken, once, again = asyncio.run(both())

    assert broken.token_ids().tolist() == plain.token_ids().tolist()
    assert loss_mask(broken).tolist() == loss_mask(plain).tolist()
    assert broken.stop_reason is plain.stop_reason
    assert len(again.calls) == len(once.calls)
    assert broken.info | {"aborts": 0} == plain.info
    assert sum(len(s.routed_experts.experts) for s in broken.segments) == broken.num_rows == len(broken) - 1
    assert broken.sequences()[-1].routed_experts.tolist() == true_rows(broken).tolist()
    owners = row_versions(broken.sequences()[-1])
    assert (np.diff(owners[:-1]) >= 0).all()
    assert owners[-1] == -1


async def test_an_update_in_the_middle_of_a_tool_call_neither_repeats_nor_loses_it():
    engine, tool = make_engine(turn(CALL), turn(ANSWER)), FakeTool(behave=lambda _: "42", seconds=0.05)
    rollout = asyncio.create_task(roll(engine, tool=tool))
    await tool.started.wait()
    await engine.pause()
    assert await engine.abort() == 0
    await engine.load(fake_weights(1))
    await asyncio.sleep(0.1)  # the tool is done; its reply waits for the engine
    assert engine.in_flight == 0
    await engine.resume()
    trajectory = await rollout
    assert (len(tool.calls), trajectory.stop_reason) == (1, StopReason.STOP)
    assert [s.weights.version for s in trajectory.segments] == [0, 1]
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()


async def test_aborts_by_the_life_cycle_resume_with_the_rows_that_were_held():
    engine = make_engine(turn(CALL), turn(ANSWER), token_s=0.0005)
    rollout = asyncio.create_task(roll(engine))
    for version in range(1, 6):
        await asyncio.sleep(0.003)
        await engine.pause()
        await engine.abort()
        await engine.load(fake_weights(version))
        await engine.resume()
    trajectory = await rollout
    assert trajectory.info["aborts"] >= 1
    assert len({s.weights.version for s in trajectory.segments}) > 1
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()
    assert trajectory.token_ids()[loss_mask(trajectory)].tolist() == ids(turn(CALL)) + ids(turn(ANSWER))


async def test_a_pause_covers_the_tool_phase():
    gate, tool = PauseGate(), FakeTool(behave=lambda _: "42")
    gate.pause()
    rollout = asyncio.create_task(roll(make_engine(turn(CALL), turn(ANSWER)), tool=tool, gate=gate))
    await asyncio.sleep(0.02)
    assert tool.calls == []
    gate.resume()
    assert (await rollout).stop_reason is StopReason.STOP
    assert len(tool.calls) == 1


async def test_cancelled_in_a_tool_the_tool_is_cancelled_and_the_trajectory_ends_with_whole_turns():
    engine, tool = make_engine(turn(CALL), turn(ANSWER)), FakeTool(seconds=30)
    trajectory = Trajectory(routing=SPEC)
    run = make_loop(engine, tool=tool).run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")
    rollout = asyncio.create_task(run)
    await tool.started.wait()
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert (tool.cancelled, trajectory.closed, len(trajectory.turns)) == (1, False, 1)
    assert text_of(trajectory).endswith(turn(CALL))


async def test_cancelled_in_a_decode_the_engine_is_free_again():
    engine = make_engine(turn(CALL), token_s=0.01)
    rollout = asyncio.create_task(roll(engine))
    await asyncio.sleep(0.03)
    assert engine.in_flight == 1
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert engine.in_flight == 0


# ---- failures


async def test_a_failed_reward_leaves_the_trajectory_open_for_the_caller_to_drop():
    trajectory = Trajectory(routing=SPEC)
    loop = make_loop(make_engine(turn(ANSWER)), reward=FakeReward(error=OSError("no verifier")))
    with pytest.raises(RewardError, match="no verifier"):
        await loop.run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")
    assert not trajectory.closed
    assert trajectory.num_sampled == len(ids(turn(ANSWER)))


async def test_an_engine_that_dies_is_an_engine_error():
    engine = make_engine(turn(CALL), token_s=0.005)
    rollout = asyncio.create_task(roll(engine))
    await asyncio.sleep(0.02)
    engine.die()
    with pytest.raises(EngineError, match="replica fake-0 is dead: killed"):
        await rollout


async def test_a_tool_out_of_order_ends_the_rollout():
    def gone(_):
        raise RolloutError("sandbox gone")

    with pytest.raises(RolloutError, match="sandbox gone"):
        await roll(make_engine(turn(CALL)), tool=FakeTool(behave=gone))


async def test_a_trajectory_that_is_closed_is_refused():
    trajectory = await roll(make_engine(turn(ANSWER)))
    with pytest.raises(ContractError, match="trajectory of prompt 0 is closed"):
        await make_loop(make_engine()).run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")


# ---- single turn


async def test_a_single_turn_ends_with_its_answer_and_reads_no_calls():
    reward, trajectory = FakeReward(), Trajectory(routing=SPEC)
    loop = SingleTurnLoop(
        engine=make_engine(turn(CALL), interruptions=[Interruption(after=4, load=1)]),
        chat=Chat(TOKENIZER, end_of_turn=END_OF_TURN),
        reward=reward,
        limits=LIMITS,
        sampling=SamplingConfig(),
    )
    await loop.run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")
    assert reward.seen[0].turns == (CALL,)
    assert trajectory.info == {"turns": 1, "aborts": 1, "refused_answers": 0}
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()
