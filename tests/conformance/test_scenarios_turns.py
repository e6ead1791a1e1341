"""Trajectories of several turns: rows of tool replies, transferred rows, and every `resume_routing`."""

import asyncio

import numpy as np
import pytest

from agent_loop.chat import Chat
from agent_loop.engine import SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools.tool import ToolRunner, describe_tool
from message_queue.tokens import StopReason
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import END_OF_TURN, build_tokenizer
from tests.conformance.checks import (
    assert_merged,
    assert_sent_once,
    assert_true,
    gaps_under_own_rows,
    rows_sent,
    sampled_of,
    versions_of,
)
from tests.conformance.engines import MARKS, tokens
from tests.conformance.reference import routing_mismatches
from tests.conformance.served import VLLM
from tests.helpers.dense import loss_mask, param_versions, row_versions
from tests.helpers.fakes import FakeReward, FakeTool
from tests.helpers.stored import stored

pytestmark = MARKS

FAR = 10  # bounds: rows of other weights move some logprob by more than this
STOPS = tuple(range(3, 117, 8))  # so many ids end a turn that none runs into its budget


class CallingChat(Chat):
    """Reads a call in every turn: a model of random weights writes none."""

    def __init__(self, tool):
        super().__init__(build_tokenizer(), end_of_turn=END_OF_TURN, tools=[describe_tool(tool)])
        self.stop_token_ids = (*self.stop_token_ids, *STOPS)

    def text(self, turn):
        del turn
        return '<tool_call>{"name": "tool", "arguments": {}}</tool_call>'

    def ends_turn(self, turn):
        return int(turn[-1]) in self.stop_token_ids


async def roll(tested, name, tool, *, max_turns, resume_routing="append"):
    loop = ToolUseLoop(
        engine=tested,
        chat=CallingChat(tool),
        tools=ToolRunner([tool], timeout_s=30),
        reward=FakeReward(),
        limits=TurnLimits(max_turns=max_turns, max_tokens=480, tool_timeout_s=30, generate_timeout_s=100),
        sampling=SamplingConfig(),
    )
    trajectory = Trajectory(routing=tested.routing, resume_routing=resume_routing)
    prompt = Prompt(index=0, messages=(Message(role="user", content=f"what is {name}?"),))
    await loop.run(prompt, trajectory=trajectory, session=name, cache_salt="v0")
    return trajectory


async def test_tool_tokens_have_the_rows_of_their_first_forward(tested):
    """An update falls into the tool phase: the rows of the tool's reply are of the weights after it."""
    tool = FakeTool(behave=lambda _: "forty-two")

    async def update_in_the_tool_phase():
        await tool.started.wait()
        await tested.publish("resume")

    tool.seconds = 0.3
    updating = tested.start(update_in_the_tool_phase())
    trajectory = await roll(tested, "tool", tool, max_turns=4)
    await updating
    exchanges = tested.of_session("tool")
    assert trajectory.stop_reason is StopReason.TOOL_CALL
    assert (len(tool.calls), len(trajectory.turns)) == (3, 4), "each call is executed once"
    assert [versions_of(exchange) for exchange in exchanges] == [[0], [1], [1], [1]]
    assert_true(tested, exchanges)
    assert_sent_once(tested, "tool", trajectory)
    first_turn = len(exchanges[0].request.token_ids) + sampled_of(exchanges[0])
    passes = row_versions(trajectory.sequences()[-1])
    assert (passes[: first_turn - 1] == 0).all()
    assert (passes[first_turn - 1 : -1] == 1).all(), "the reply was first seen by version 1"
    sampled = np.concatenate(
        [np.arange(len(e.request.token_ids), len(e.request.token_ids) + sampled_of(e)) for e in exchanges]
    )
    assert np.flatnonzero(loss_mask(trajectory)).tolist() == sampled.tolist()


@pytest.mark.parametrize(
    ("resume_routing", "modes"),
    [("append", ("resume", "drain", "resume")), ("force", ("resume", "keep-recompute", "resume"))],
    ids=["append", "force"],
)
async def test_several_tool_users_of_one_prompt_over_updates_in_flight(tested, resume_routing, modes):
    tool = FakeTool(behave=lambda _: "yes", seconds=0.01)
    tasks = [
        tested.start(roll(tested, f"user-{i}", tool, max_turns=5, resume_routing=resume_routing)) for i in range(4)
    ]
    for mode in modes:
        await asyncio.sleep(0.05)
        await tested.publish(mode)
    for i, trajectory in enumerate(await asyncio.gather(*tasks)):
        assert_sent_once(tested, f"user-{i}", trajectory)
        assert len(trajectory.turns) == 5
    assert len(tool.calls) == 16
    assert_true(tested, tested.exchanges)


async def ten_turns(tested, rollout):
    """Ten turns, aborted in five; every second abort comes with new weights."""
    for turn in range(10):
        observation = tokens(20 if not turn else 5, seed=turn)
        interrupt = rollout.decoder.num_aborts < 5
        left = VLLM.max_model_len - len(rollout.trajectory) - len(observation) - (9 - turn) * (5 + 8)  # for this turn
        task = tested.start(rollout.turn(observation, max_new_tokens=min(75, left) if interrupt else 8))
        if interrupt:
            await tested.until_sampled(4)
            await (tested.publish("resume") if turn % 2 else tested.replica.abort())
        await task


async def test_ten_turns_with_five_resumes_send_each_row_once(tested, report):
    rollout = tested.rollout("ten-turns", cache_salt="v0")
    await ten_turns(tested, rollout)
    trajectory, exchanges = rollout.trajectory, tested.of_session("ten-turns")
    assert (len(trajectory.turns), rollout.decoder.num_aborts, len(exchanges)) == (10, 5, 15)
    assert len(set(param_versions(trajectory).tolist()) - {-1}) >= 2
    assert_true(tested, exchanges)
    assert_sent_once(tested, "ten-turns", trajectory)
    rows = len(trajectory) - 1
    trajectory.close(stop_reason=StopReason.STOP, reward=1.0)
    again = await stored(trajectory)
    held, read = trajectory.sequences()[-1].routed_experts, again.sequences()[-1].routed_experts
    assert read.tolist() == held.tolist()
    moe_layers, top_k = tested.routing.row_shape
    row_bytes = sum(s.routed_experts.experts.nbytes for s in again.segments if s.routed_experts is not None)
    assert row_bytes == rows * moe_layers * top_k, "a byte per expert"
    report(
        f"{type(tested.replica).__name__}: 10 turns, 5 resumes, {rows + 1} tokens: "
        f"{len(rows_sent(exchanges))} rows from the engine, {row_bytes} bytes of rows in the content store"
    )


@pytest.mark.parametrize("resume_routing", ["append", "force", "replace", "split"])
async def test_rows_of_a_reforwarded_prefix_by_resume_routing(tested, resume_routing):
    rollout = tested.rollout("routing", resume_routing=resume_routing, cache_salt="v0")
    task = tested.start(rollout.turn(tokens(40), max_new_tokens=200))
    for more in (True, False):
        await tested.until_sampled(10)
        assert (await tested.publish("resume", stays_slow=more)).aborted == 1
    await task
    await rollout.turn(tokens(6, seed=1), max_new_tokens=30)
    trajectory, exchanges = rollout.trajectory, tested.of_session("routing")
    assert [versions_of(exchange) for exchange in exchanges] == [[0], [1], [2], [2]]
    assert_true(tested, exchanges)
    sequences = trajectory.sequences()
    assert sum(int(loss_mask(sequence).sum()) for sequence in sequences) == 230
    gaps = [gaps_under_own_rows(tested, sequence) for sequence in sequences]
    match resume_routing:
        case "append" | "force":
            assert_sent_once(tested, "routing", trajectory)
            assert [sorted(gap) for gap in gaps] == [[0, 1, 2]]
            assert gaps[0][0] <= 1
        case "replace":
            assert_merged(trajectory, exchanges)
            last = tested.truth([(2, len(trajectory))], trajectory.token_ids(), forced=None)
            rows = trajectory.sequences()[-1].routed_experts
            assert routing_mismatches(last, rows[:-1], start=0) == 0
            assert gaps[0][2] <= 1
        case _:
            assert [sorted(gap) for gap in gaps] == [[0], [1], [2]], "one sequence per set of rows"
    if resume_routing in ("force", "split"):
        assert max(max(gap.values()) for gap in gaps) <= 1, "training repeats the routing of the rollout"
    elif tested.probe.kv_tokens is not None:  # the fake's logprobs do not depend on rows
        assert max(gaps[0].values()) > FAR, "training routes otherwise than the rollout"
