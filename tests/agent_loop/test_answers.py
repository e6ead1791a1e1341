"""Answers that break the contract: refused, asked for again, given up at last; and answers that are cut."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.answers import check_answer, cut_segments
from agent_loop.engine import AnswerError, GenerateRequest, SamplingConfig
from agent_loop.loop import RolloutError
from message_queue.tokens import ContractError, StopReason
from message_queue.trajectory import Trajectory
from tests.agent_loop.test_decoder import PROMPT, STOP, decoded, make_decoder, opened, scripted
from tests.helpers.dense import loss_mask, param_versions, row_versions
from tests.helpers.fakes import FakeEngine, Interruption, true_rows, true_support
from tests.helpers.faults import FAULTS
from tests.helpers.groups import sets_of

BUDGET = 12
LONG = 16  # a seed that gives 20 tokens and no stop token among them
CANNOT_BE_BUILT = {
    "an expert twice",
    "a logprob that is not a number",
    "a positive logprob",
    "a logprob too few",
    "a negative token id",
}  # as a segment, so that the whole answer fails even where an engine has no edge
HOLDS = [Interruption(after=3, load=1, goes_on=True), Interruption(after=2, load=2, goes_on=True)]


async def plain_tokens(seed=LONG, budget=BUDGET):
    trajectory, _, _ = await decoded(scripted(seed), budget=budget)
    return trajectory.token_ids().tolist()


# ---- refused answers


@pytest.mark.parametrize("edge", [True, False], ids=["refused at the edge", "refused by the trajectory"])
@pytest.mark.parametrize("name", FAULTS)
async def test_a_bad_answer_is_not_used_and_the_request_is_made_again_under_another_id(name, edge):
    engine = scripted(LONG, faults=[FAULTS[name]], edge=edge)
    trajectory, reason, decoder = await decoded(engine, budget=BUDGET)
    first, second = engine.requests
    assert (first.request_id, second.request_id) == ("s#0.", "s#1.")
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert (first.existing_rows, first.max_new_tokens) == (second.existing_rows, second.max_new_tokens)
    assert (decoder.num_refused, decoder.num_aborts, reason) == (1, 0, StopReason.LENGTH)
    assert trajectory.token_ids().tolist() == await plain_tokens()
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()


@pytest.mark.parametrize("name", FAULTS)
async def test_segments_before_the_bad_one_are_kept_where_an_engine_has_no_edge(name):
    engine = scripted(LONG, interruptions=HOLDS[:1], faults=[FAULTS[name]], edge=False)
    trajectory, _, decoder = await decoded(engine, budget=BUDGET)
    assert decoder.num_refused == 1
    kept = len(engine.requests[1].token_ids) - len(PROMPT)
    assert kept == (0 if name in CANNOT_BE_BUILT else 3)
    assert trajectory.token_ids().tolist() == await plain_tokens()
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()


async def test_an_answer_of_several_segments_that_an_edge_refuses_is_not_used_at_all():
    engine = scripted(LONG, interruptions=HOLDS, faults=[FAULTS["a row too few"]])
    trajectory, _, _ = await decoded(engine, budget=BUDGET)
    assert [len(r.token_ids) for r in engine.requests] == [len(PROMPT)] * 2
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()


async def test_too_many_bad_answers_in_a_row_end_the_rollout_with_the_last_reason():
    faults = [None, *[FAULTS["a row too few"]] * 2, FAULTS["an expert twice"]]
    engine = scripted(LONG, interruptions=[Interruption(after=4)], faults=faults)
    trajectory = opened()
    with pytest.raises(RolloutError) as caught:
        await make_decoder(engine, max_refused_answers=2).decode(trajectory, max_new_tokens=BUDGET)
    message = str(caught.value)
    assert message.startswith(
        "the answer to request s#3. was refused, 3 in a row (limits.max_refused_answers=2): fake-0"
    )
    assert "duplicate expert" in message
    assert isinstance(caught.value.__cause__, AnswerError)
    assert trajectory.num_sampled == 4  # up to the last good segment
    assert trajectory.num_rows == len(trajectory) - 1


async def test_a_good_answer_in_between_starts_the_count_anew():
    bad = FAULTS["no rows"]
    engine = scripted(LONG, interruptions=[Interruption(after=2)] * 6, faults=[bad, bad, None, bad, bad, None])
    trajectory, _, decoder = await decoded(engine, budget=BUDGET, max_refused_answers=2)
    assert decoder.num_refused == 4
    assert trajectory.token_ids().tolist() == await plain_tokens()


async def test_without_patience_the_first_bad_answer_ends_the_rollout():
    with pytest.raises(RolloutError, match="1 in a row"):
        await decoded(scripted(LONG, faults=[FAULTS["no rows"]]), budget=5, max_refused_answers=0)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 50),
    interruptions=st.lists(
        st.builds(Interruption, after=st.integers(0, 4), load=st.none(), goes_on=st.booleans()), max_size=8
    ),
    publishes=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    faults=st.lists(st.one_of(st.none(), st.sampled_from(sorted(FAULTS))), max_size=8),
    edge=st.booleans(),
    resume_routing=st.sampled_from(["append", "force"]),
)
def test_any_schedule_of_faults_aborts_and_updates_in_flight_gives_the_uninterrupted_tokens_and_true_rows(
    seed, interruptions, publishes, faults, edge, resume_routing
):
    versions = np.cumsum(publishes).tolist()
    schedule = [replace(i, load=v) for i, v in zip(interruptions, versions, strict=False)]

    async def both():
        plain, plain_reason, _ = await decoded(scripted(seed), budget=20)
        spoilt = [name and FAULTS[name] for name in faults]
        engine = scripted(seed, interruptions=schedule, faults=spoilt, edge=edge)
        options = {"max_refused_answers": 8, "resume_routing": resume_routing}
        return plain, plain_reason, await decoded(engine, budget=20, **options), engine

    plain, plain_reason, (broken, reason, _), engine = asyncio.run(both())
    assert (broken.token_ids().tolist(), reason) == (plain.token_ids().tolist(), plain_reason)
    assert broken.num_rows == len(broken) - 1
    assert broken.sequences()[-1].routed_experts.tolist() == true_rows(broken).tolist()
    assert len({r.request_id for r in engine.requests}) == len(engine.requests)
    for request in engine.requests:
        assert len(request.token_ids) - len(PROMPT) + request.max_new_tokens == 20
        forced = request.forced_experts
        assert (0 if forced is None else forced.end_position) == (
            request.existing_rows if resume_routing == "force" else 0
        )


# ---- what no engine may answer


def request(**options):
    return GenerateRequest(
        request_id="r.", token_ids=PROMPT, **({"max_new_tokens": 9, "stop_token_ids": (STOP,)} | options)
    )


async def good_answer(seed=LONG, **options):
    return await scripted(seed, **options).generate(request())


async def test_no_segment_is_refused():
    with pytest.raises(ContractError, match=r"request r\. was answered with no segment"):
        check_answer([], request())


async def test_more_tokens_than_asked_for_are_refused():
    with pytest.raises(ContractError, match=r"fake-0 returned 9 tokens for request r\., which asked for at most 8"):
        check_answer(await good_answer(), request(max_new_tokens=8))


async def test_a_segment_that_goes_on_without_an_abort_is_refused():
    first, second = await good_answer(interruptions=HOLDS[:1])
    with pytest.raises(ContractError, match=r"segment 0 of request r.*stop_reason length"):
        check_answer([replace(first, stop_reason=StopReason.LENGTH), second], request())


async def test_a_segment_without_tokens_that_goes_on_is_refused():
    (abort,) = await good_answer(interruptions=[Interruption(after=0)])
    with pytest.raises(ContractError, match=r"segment 0 of request r.*0 tokens"):
        check_answer([abort, *await good_answer()], request())


async def test_tokens_after_a_stop_token_are_refused_within_a_segment_and_over_several():
    first, second = await good_answer(interruptions=HOLDS[:1])
    inside = replace(second, token_ids=np.where(np.arange(len(second)) == 1, STOP, second.token_ids).astype(np.int32))
    before = replace(first, token_ids=np.where(np.arange(3) == 2, STOP, first.token_ids).astype(np.int32))
    late = replace(second, token_ids=np.where(np.arange(len(second)) == 4, STOP, second.token_ids).astype(np.int32))
    for answer, at in (([first, inside], 4), ([before, second], 2), ([first, late], 7)):
        with pytest.raises(ContractError, match=f"stop token {STOP} as token {at} of 9"):
            check_answer(answer, request())


# ---- rows that are asked for


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("goes_on", [False, True], ids=["abort", "in flight"])
@pytest.mark.parametrize("resume_routing", ["append", "force", "replace", "split"])
async def test_resumed_at_every_position_each_mode_asks_for_its_rows(position, goes_on, resume_routing):
    engine = scripted(LONG, interruptions=[Interruption(after=position, load=1, goes_on=goes_on)])
    trajectory, _, _ = await decoded(engine, budget=8, resume_routing=resume_routing)
    assert trajectory.token_ids().tolist() == await plain_tokens(budget=8)
    assert (trajectory.num_rows, trajectory.num_sampled) == (len(trajectory) - 1, 8)
    versions = param_versions(trajectory)[loss_mask(trajectory)].tolist()
    assert versions == [0] * position + [1] * (8 - position)
    resumed = engine.requests[1:]
    assert len(resumed) == (0 if goes_on else 1)
    held = len(PROMPT) + position - 1 if position else 0
    for again in resumed:
        assert again.existing_rows == (held if resume_routing in ("append", "force") else 0)
        forced = again.forced_experts
        assert (forced is not None) == (resume_routing == "force" and position > 0)
        if forced is not None:
            assert (forced.first_position, forced.end_position) == (0, held)
            assert forced.experts.tolist() == trajectory.sequences()[-1].routed_experts[:held].tolist()
    if resume_routing in ("append", "force") or goes_on:
        assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()
    if resume_routing == "replace" and not goes_on:
        assert set(row_versions(trajectory.sequences()[-1])[:-1].tolist()) == {1}
    if resume_routing == "split":
        assert len(trajectory.sequences()) == (2 if resumed and position else 1)


async def test_rows_behind_one_that_no_engine_could_give_are_not_forced():
    def lose_a_row(_request, answer):
        rows = answer[0].routed_experts
        late = replace(rows, first_position=rows.first_position + 2, experts=rows.experts[2:], unavailable=2)
        return [replace(answer[0], routed_experts=late)]

    engine = scripted(LONG, interruptions=[Interruption(after=2)] * 2, faults=[None, lose_a_row], edge=False)
    trajectory, _, _ = await decoded(engine, budget=8, resume_routing="force")
    assert trajectory.num_unavailable_rows == 2
    first, second, third = engine.requests
    assert first.forced_experts is None
    whole = second.forced_experts.end_position
    assert whole == second.existing_rows == len(PROMPT) + 1
    assert third.existing_rows == len(PROMPT) + 3
    assert third.forced_experts.end_position == whole  # not beyond the rows that are -1


async def test_a_run_that_captures_no_routing_forces_nothing():
    trajectory = Trajectory(routing=None, resume_routing="force")
    trajectory.observe(PROMPT)
    engine = scripted(LONG, routing=None, interruptions=[Interruption(after=2)])
    await make_decoder(engine).decode(trajectory, max_new_tokens=4)
    assert [r.forced_experts for r in engine.requests] == [None, None]


# ---- cut where a stop string ends


def find_after(count):
    return lambda tokens: count if len(tokens) >= count else None


def without_support(_request, answer):
    return [replace(segment, support=None) for segment in answer]


def find(*wanted):
    """Ends a turn after the tokens `wanted`, wherever they come."""

    def find_stop(turn):
        ids = turn.tolist()
        ends = [i + len(wanted) for i in range(len(ids)) if tuple(ids[i : i + len(wanted)]) == wanted]
        return min(ends, default=None)

    return find_stop


@pytest.mark.parametrize("name", ["a row too few", "a row too many", "rows that start late"])
async def test_rows_of_a_wrong_extent_are_refused_before_a_stop_string_cuts_them(name):
    engine = scripted(LONG, interruptions=HOLDS[:1], faults=[FAULTS[name]], edge=False)
    stop = (await plain_tokens(budget=BUDGET))[len(PROMPT) + 5]
    trajectory, reason, decoder = await decoded(engine, budget=BUDGET, find_stop=find(stop))
    assert (decoder.num_refused, reason) == (1, StopReason.STOP)
    assert len(engine.requests[1].token_ids) - len(PROMPT) == 3, "the segment before is kept"
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()


@pytest.mark.parametrize("count", range(1, 10))
async def test_a_cut_answer_is_what_an_engine_returns_that_stopped_there(count):
    whole = await good_answer(interruptions=HOLDS)
    cut = cut_segments(whole, count=count, first_position=len(PROMPT))
    trajectory = opened()
    for segment in cut:
        trajectory.extend(segment)
    assert (trajectory.num_sampled, cut[-1].stop_reason) == (count, StopReason.STOP)
    assert [len(s) for s in cut] == [n for n in (min(count, 3), min(count - 3, 2), count - 5) if n > 0]
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 20),
    interruptions=st.lists(st.builds(Interruption, after=st.integers(0, 3), goes_on=st.booleans()), max_size=5),
)
def test_aborts_and_stop_strings_leave_each_kept_set_at_its_token(count, interruptions):
    async def run():
        engine = scripted(LONG, interruptions=interruptions)
        find_stop = find_after(count)
        return await decoded(engine, budget=20, sampling=SamplingConfig(top_p=0.9), find_stop=find_stop)

    trajectory, _, _ = asyncio.run(run())
    assert trajectory.num_sampled <= count
    assert sets_of(trajectory.sequences()[-1].support) == true_support(trajectory)


async def test_an_answer_without_the_kept_tokens_is_refused():
    engine = scripted(LONG, faults=[without_support])
    trajectory, _, decoder = await decoded(engine, budget=BUDGET, sampling=SamplingConfig(top_k=3))
    assert decoder.num_refused == 1
    assert sets_of(trajectory.sequences()[-1].support) == true_support(trajectory)


@settings(deadline=None, max_examples=40)
@given(
    at=st.integers(0, 8),
    width=st.integers(1, 3),
    interruptions=st.lists(st.builds(Interruption, after=st.integers(0, 3), goes_on=st.booleans()), max_size=5),
)
def test_a_turn_ends_with_the_token_in_which_its_stop_string_ends_whatever_interrupts_it(at, width, interruptions):
    async def both():
        plain, _, _ = await decoded(scripted(LONG), budget=20)
        sampled = plain.token_ids()[len(PROMPT) :].tolist()
        wanted = tuple(sampled[at : at + width])
        engine = scripted(LONG, interruptions=interruptions)
        return sampled, wanted, await decoded(engine, budget=20, find_stop=find(*wanted))

    sampled, wanted, (trajectory, reason, _) = asyncio.run(both())
    assert reason is StopReason.STOP
    expected = sampled[: find(*wanted)(np.asarray(sampled))]
    assert trajectory.token_ids()[len(PROMPT) :].tolist() == expected
    assert trajectory.num_rows == len(trajectory) - 1
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()


async def test_a_stop_string_that_never_comes_costs_no_token_and_nothing_is_decoded_far_past_one_that_does():
    def script(ids):
        return 7 if len(ids) == len(PROMPT) + 100 else 5

    never = FakeEngine(script)
    trajectory, reason, _ = await decoded(never, budget=300, find_stop=find(9))
    assert (reason, trajectory.num_sampled) == (StopReason.LENGTH, 300)
    assert [r.max_new_tokens for r in never.requests] == [64, 64, 64, 64, 44]
    found = FakeEngine(script)
    trajectory, reason, _ = await decoded(found, budget=300, find_stop=find(7))
    assert (reason, trajectory.num_sampled, found.num_tokens) == (StopReason.STOP, 101, 128)
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()
