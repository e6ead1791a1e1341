"""A rollout that is cut off after any record goes on from what was recorded, and ends as if nothing had happened."""

import numpy as np
import pytest

from agent_loop.chat import Chat
from agent_loop.engine import SamplingConfig
from agent_loop.loop import TurnLimits
from agent_loop.single_turn import SingleTurnLoop
from async_rl.rollout.recorded import RecordedTrajectory
from message_queue.progress import CallStarted, TrajectoryClosed
from message_queue.tokens import StopReason, TokenOutput
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import END_OF_TURN
from tests.agent_loop.test_loops import ANSWER, CALL, LIMITS, PROMPT, TOKENIZER, ids, make_engine, make_loop, turn
from tests.helpers.dense import behaviour_logprobs
from tests.helpers.fakes import SPEC, FakeReward, FakeTool, Interruption, true_rows
from tests.message_queue.test_content import same_trajectory

TOOL_USE = (turn(CALL), turn("two " + CALL), turn(ANSWER))
SHORT_TURNS = TurnLimits(max_turns=6, max_tokens=224, max_new_tokens_per_turn=30)


def interrupted():
    """Each decode is cut into pieces of a few tokens."""
    return [Interruption(after=n) for n in (5, 4, 7, 3) * 30]


def tool_use(engine, limits=LIMITS):
    return make_loop(engine, limits=limits, tool=FakeTool(behave=lambda _: "42"))


def single_turn(engine):
    return SingleTurnLoop(
        engine=engine,
        chat=Chat(TOKENIZER, end_of_turn=END_OF_TURN, stop_strings=("</answer>",)),
        reward=FakeReward(),
        limits=LIMITS,
        sampling=SamplingConfig(),
    )


async def run(loop, trajectory, records):
    recorded = RecordedTrajectory(trajectory, record=lambda at, what: records.append((at, what)))
    await loop.run(PROMPT, trajectory=recorded, session="s", cache_salt="v0")
    return recorded


def rebuilt(records):
    """What a journal gives back."""
    trajectory = Trajectory(routing=SPEC)
    for at, what in records:
        assert at == len(trajectory)
        match what:
            case TokenOutput():
                trajectory.extend(what)
            case CallStarted():
                pass
            case TrajectoryClosed():
                trajectory.close(stop_reason=what.stop_reason, reward=what.reward, info=dict(what.info))
            case _:
                trajectory.observe(np.array(what))
    return trajectory


@pytest.mark.parametrize(
    ("make", "turns"),
    [
        (tool_use, TOOL_USE),
        (lambda engine: tool_use(engine, SHORT_TURNS), (turn(CALL), "x" * 90)),
        (single_turn, (turn("6 times 7 is 42, so " + ANSWER + " and"),)),
    ],
    ids=["tools", "budget-per-turn", "stop-string"],
)
async def test_a_rollout_goes_on_after_any_record_without_sampling_a_token_again(make, turns):
    records = []
    whole = await run(make(make_engine(*turns, interruptions=interrupted())), Trajectory(routing=SPEC), records)
    assert len(whole.segments) > 4
    same_trajectory(rebuilt(records), whole)
    for cut in range(len(records)):
        held, more = rebuilt(records[:cut]), []
        engine = make_engine(*turns)
        tokens, sampled = len(held), held.num_sampled
        found = await run(make(engine), held, more)
        assert all(len(request.token_ids) >= tokens for request in engine.requests)
        beyond = 0 if sampled == whole.num_sampled else len(ids(turns[-1])) - whole.turns[-1].num_sampled
        assert engine.num_tokens == whole.num_sampled - sampled + (beyond if make is single_turn else 0), cut
        assert found.token_ids().tolist() == whole.token_ids().tolist()
        assert behaviour_logprobs(found).tolist() == behaviour_logprobs(whole).tolist()
        assert found.sequences()[-1].routed_experts.tolist() == true_rows(found).tolist()
        assert (found.stop_reason, found.reward) == (whole.stop_reason, whole.reward)
        assert found.info["turns"] == whole.info["turns"]
        assert found.info.get("tool_calls") == whole.info.get("tool_calls")
        same_trajectory(rebuilt([*records[:cut], *more]), found)


async def test_a_call_that_was_begun_is_not_made_again_and_the_model_is_told():
    records, tool = [], FakeTool(behave=lambda _: "42")
    await run(make_loop(make_engine(*TOOL_USE), tool=tool), Trajectory(routing=SPEC), records)
    assert len(tool.calls) == 2
    (first, _) = (at for at, (_, what) in enumerate(records) if isinstance(what, CallStarted))
    held, again = rebuilt(records[: first + 1]), FakeTool(behave=lambda _: "42")
    held.unsure_call = records[first][1].call
    found = await run(make_loop(make_engine(*TOOL_USE), tool=again), held, [])
    assert len(again.calls) == 1, "only the second call is made"
    assert "the call was interrupted; it may have happened or not" in TOKENIZER.decode(found.token_ids().tolist())
    assert (found.info["tool_errors"], found.stop_reason) == (1, StopReason.STOP)


async def test_a_call_is_written_down_before_it_is_made():
    order = []

    async def flush():
        order.append("written")

    def call(_):
        order.append("called")
        return "42"

    trajectory = RecordedTrajectory(Trajectory(routing=SPEC), record=lambda at, what: None, flush=flush)
    loop = make_loop(make_engine(*TOOL_USE), tool=FakeTool(behave=call))
    await loop.run(PROMPT, trajectory=trajectory, session="s", cache_salt="v0")
    assert order == ["written", "called"] * 2
