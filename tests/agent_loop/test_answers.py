"""Answers that break the contract: refused, retried, given up at last; and answers that are cut."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.decoder import check_answer
from agent_loop.engine import GenerateRequest, SamplingConfig
from message_queue.errors import AnswerError, ContractError, RolloutError
from message_queue.tokens import StopReason
from message_queue.trajectory import Trajectory
from tests.agent_loop.test_decoder import LONG, PROMPT, STOP, decoded, make_decoder, opened, scripted
from tests.helpers.dense import loss_mask
from tests.helpers.fakes import FakeEngine, Interruption, true_rows, true_support
from tests.helpers.faults import FAULTS
from tests.helpers.groups import sets_of

BUDGET = 12
CANNOT_BE_BUILT = {
    "an expert twice",
    "a logprob that is not a number",
    "a positive logprob",
    "a logprob too few",
    "a negative token id",
}  # as a segment, so that the whole answer fails even where an engine has no edge
HOLD = Interruption(after=3, load=1, goes_on=True)
interruptions = st.lists(st.builds(Interruption, after=st.integers(0, 4), goes_on=st.booleans()), max_size=8)


async def plain_tokens(seed=LONG, budget=BUDGET):
    trajectory, _, _ = await decoded(scripted(seed), budget=budget)
    return trajectory.token_ids().tolist()


def check_rows(trajectory):
    assert trajectory.num_rows == len(trajectory) - 1
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()


@pytest.mark.parametrize("edge", [True, False], ids=["refused at the edge", "refused by the trajectory"])
@pytest.mark.parametrize("name", FAULTS)
async def test_refused_answer_keeps_its_good_segments_and_is_retried(name, edge):
    engine = scripted(LONG, interruptions=[HOLD], faults=[FAULTS[name]], edge=edge)
    trajectory, reason, decoder = await decoded(engine, budget=BUDGET)
    first, second = engine.requests
    assert (first.request_id, second.request_id) == ("s#0.", "s#1.")
    kept = 0 if edge or name in CANNOT_BE_BUILT else 3
    assert len(second.token_ids) == len(PROMPT) + kept
    assert (decoder.num_refused, decoder.num_aborts, reason) == (1, 0, StopReason.LENGTH)
    assert trajectory.token_ids().tolist() == await plain_tokens()
    check_rows(trajectory)


@pytest.mark.parametrize("patience", [0, 2])
async def test_more_refused_answers_than_allowed_end_the_rollout(patience):
    faults = [None, *[FAULTS["a row too few"]] * patience, FAULTS["an expert twice"]]
    engine = scripted(LONG, interruptions=[Interruption(after=4)], faults=faults)
    trajectory = opened()
    with pytest.raises(RolloutError, match=r"s#.*limits\.max_refused_answers") as caught:
        await make_decoder(engine, max_refused_answers=patience).decode(trajectory, max_new_tokens=BUDGET)
    assert isinstance(caught.value.__cause__, AnswerError)
    assert len(engine.requests) == patience + 2
    assert trajectory.num_sampled == 4  # up to the last good segment
    assert trajectory.num_rows == len(trajectory) - 1


async def test_good_answer_restarts_the_count_of_refused_answers():
    bad = FAULTS["no rows"]
    engine = scripted(LONG, interruptions=[Interruption(after=2)] * 6, faults=[bad, bad, None, bad, bad, None])
    trajectory, _, decoder = await decoded(engine, budget=BUDGET, max_refused_answers=2)
    assert decoder.num_refused == 4
    assert trajectory.token_ids().tolist() == await plain_tokens()


@given(
    seed=st.integers(0, 200),
    budget=st.integers(1, 30),
    stride=st.integers(1, 40),
    interruptions=interruptions,
    publishes=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    faults=st.lists(st.one_of(st.none(), st.sampled_from(sorted(FAULTS))), max_size=8),
    edge=st.booleans(),
    resume_routing=st.sampled_from(["append", "force", "replace", "split"]),
)
def test_decoder_gives_the_same_tokens_and_true_rows_in_any_schedule(
    seed, budget, stride, interruptions, publishes, faults, edge, resume_routing
):
    versions = np.cumsum(publishes).tolist()
    engine = scripted(
        seed,
        interruptions=[replace(i, load=v) for i, v in zip(interruptions, versions, strict=False)],
        faults=[name and FAULTS[name] for name in faults],
        edge=edge,
    )

    async def both():
        options = {"max_refused_answers": 8, "resume_routing": resume_routing, "segment_tokens": stride}
        return await decoded(scripted(seed), budget=budget), await decoded(engine, budget=budget, **options)

    (plain, plain_reason, _), (broken, reason, decoder) = asyncio.run(both())
    assert (broken.token_ids().tolist(), reason) == (plain.token_ids().tolist(), plain_reason)
    assert loss_mask(broken).tolist() == loss_mask(plain).tolist()
    assert all(map(len, broken.segments))
    assert broken.num_rows == len(broken) - 1
    if resume_routing in ("append", "force"):
        check_rows(broken)
        assert sum(len(s.routed_experts.experts) for s in broken.segments) == broken.num_rows, "each row came once"
    assert len({r.request_id for r in engine.requests}) == len(engine.requests)
    for request in engine.requests:
        assert request.max_new_tokens == min(stride, len(PROMPT) + budget - len(request.token_ids))
        if resume_routing in ("replace", "split"):
            assert request.existing_rows == 0
        if (forced := request.forced_experts) is not None:
            assert forced.experts.tolist() == broken.sequences()[-1].routed_experts[: request.existing_rows].tolist()
        assert (forced is not None) == (resume_routing == "force" and request.existing_rows > 0)
    complete = sum(len(b.token_ids) - len(a.token_ids) == a.max_new_tokens for a, b in pairwise(engine.requests))
    assert complete + decoder.num_aborts + decoder.num_refused == len(engine.requests) - 1


# ---- answers that no engine may give


def request(**options):
    return GenerateRequest(
        request_id="r.", token_ids=PROMPT, **({"max_new_tokens": 9, "stop_token_ids": (STOP,)} | options)
    )


async def test_check_answer_refuses_segments_that_do_not_follow_each_other():
    first, second = await scripted(LONG, interruptions=[HOLD]).generate(request())
    (empty,) = await scripted(LONG, interruptions=[Interruption(after=0)]).generate(request())
    check_answer([first, second], request())
    for answer, named in (
        ([], "no segment"),
        ([replace(first, stop_reason=StopReason.LENGTH), second], "segment 0 .* stop_reason"),
        ([empty, first], "segment 0 .* 0 tokens"),
    ):
        with pytest.raises(ContractError, match=named):
            check_answer(answer, request())
    with pytest.raises(ContractError, match="9 tokens"):
        check_answer([first, second], request(max_new_tokens=8))


@pytest.mark.parametrize("at", [2, 4, 7], ids=["end of a segment", "inside one", "before the last"])
async def test_check_answer_refuses_tokens_after_a_stop_token(at):
    segments = await scripted(LONG, interruptions=[HOLD]).generate(request())
    tokens = np.concatenate([segment.token_ids for segment in segments])
    tokens[at] = STOP
    spoilt = [replace(s, token_ids=ids) for s, ids in zip(segments, np.split(tokens, [3]), strict=True)]
    with pytest.raises(ContractError, match=f"stop token {STOP} as token {at} of 9"):
        check_answer(spoilt, request())


async def test_rows_behind_an_unavailable_one_are_not_forced():
    def lose_a_row(_request, answer):
        rows = answer[0].routed_experts
        late = replace(rows, first_position=rows.first_position + 2, experts=rows.experts[2:], unavailable=2)
        return [replace(answer[0], routed_experts=late)]

    engine = scripted(LONG, interruptions=[Interruption(after=2)] * 2, faults=[None, lose_a_row], edge=False)
    trajectory, _, _ = await decoded(engine, budget=8, resume_routing="force")
    assert trajectory._rows.num_unavailable == 2
    first, second, third = engine.requests
    assert first.forced_experts is None
    whole = second.forced_experts.end_position
    assert whole == second.existing_rows == len(PROMPT) + 1
    assert third.existing_rows == len(PROMPT) + 3
    assert third.forced_experts.end_position == whole  # not beyond the rows that are -1


async def test_decoder_without_routing_forces_nothing():
    trajectory = Trajectory(routing=None, resume_routing="force")
    trajectory.observe(PROMPT)
    engine = scripted(LONG, routing=None, interruptions=[Interruption(after=2)])
    await make_decoder(engine).decode(trajectory, max_new_tokens=4)
    assert [r.forced_experts for r in engine.requests] == [None, None]


def find(*wanted):
    """Ends a turn after the tokens `wanted`, wherever they come."""

    def find_stop(turn):
        ids = turn.tolist()
        ends = [i + len(wanted) for i in range(len(ids)) if tuple(ids[i : i + len(wanted)]) == wanted]
        return min(ends, default=None)

    return find_stop


@pytest.mark.parametrize("name", ["a row too few", "a row too many", "rows that start late"])
async def test_rows_of_a_wrong_extent_are_refused_before_a_stop_string_cuts_them(name):
    engine = scripted(LONG, interruptions=[HOLD], faults=[FAULTS[name]], edge=False)
    stop = (await plain_tokens())[len(PROMPT) + 5]
    trajectory, reason, decoder = await decoded(engine, budget=BUDGET, find_stop=find(stop))
    assert (decoder.num_refused, reason) == (1, StopReason.STOP)
    assert len(engine.requests[1].token_ids) - len(PROMPT) == 3, "the segment before is kept"
    check_rows(trajectory)


async def test_answer_without_the_kept_tokens_is_refused():
    engine = scripted(LONG, faults=[lambda _, answer: [replace(segment, support=None) for segment in answer]])
    trajectory, _, decoder = await decoded(engine, budget=BUDGET, sampling=SamplingConfig(top_k=3))
    assert decoder.num_refused == 1
    assert sets_of(trajectory.sequences()[-1].support) == true_support(trajectory)


@settings(max_examples=80)
@given(at=st.integers(0, 17), width=st.integers(1, 3), interruptions=interruptions)
def test_stop_string_ends_a_turn_with_its_token_rows_and_kept_sets(at, width, interruptions):
    sampled = asyncio.run(plain_tokens(budget=20))[len(PROMPT) :]
    find_stop = find(*sampled[at : at + width])
    engine, sampling = scripted(LONG, interruptions=interruptions), SamplingConfig(top_p=0.9)
    trajectory, reason, _ = asyncio.run(decoded(engine, budget=20, find_stop=find_stop, sampling=sampling))
    assert reason is StopReason.STOP
    assert trajectory.token_ids()[len(PROMPT) :].tolist() == sampled[: find_stop(np.asarray(sampled))]
    check_rows(trajectory)
    assert sets_of(trajectory.sequences()[-1].support) == true_support(trajectory)


async def test_stop_string_costs_no_token_and_little_is_decoded_past_it():
    def script(ids):
        return 7 if len(ids) == len(PROMPT) + 100 else 5

    never = FakeEngine(script)
    trajectory, reason, _ = await decoded(never, budget=300, find_stop=find(9))
    assert (reason, trajectory.num_sampled) == (StopReason.LENGTH, 300)
    assert [r.max_new_tokens for r in never.requests] == [64, 64, 64, 64, 44]
    found = FakeEngine(script)
    trajectory, reason, _ = await decoded(found, budget=300, find_stop=find(7))
    assert (reason, trajectory.num_sampled, found.num_tokens) == (StopReason.STOP, 101, 128)
    check_rows(trajectory)
