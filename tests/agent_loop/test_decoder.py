import asyncio
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.decoder import SegmentDecoder, observe_prompt
from agent_loop.engine import EngineError, GenerateRequest, ReplicaLostError, SamplingConfig
from agent_loop.loop import PromptError, RolloutError, TurnLimits
from message_queue.tokens import StopReason, TokenOutput
from message_queue.trajectory import Trajectory
from tests.helpers.dense import loss_mask, row_versions
from tests.helpers.fakes import SPEC, FakeEngine, Interruption, SeededScript, fake_weights, true_rows

STOP = 0
PROMPT = np.arange(5, 12, dtype=np.int32)


def make_decoder(engine, *, session="s", sampling=None, find_stop=None, generate_timeout_s=5.0, **limits):
    return SegmentDecoder(
        engine,
        sampling=sampling or SamplingConfig(),
        stop_token_ids=(STOP,),
        session=session,
        cache_salt="salt",
        limits=TurnLimits(max_turns=1, max_tokens=1000, generate_timeout_s=generate_timeout_s, **limits),
        find_stop=find_stop,
    )


def opened(resume_routing="append"):
    trajectory = Trajectory(routing=SPEC, resume_routing=resume_routing)
    trajectory.observe(PROMPT)
    return trajectory


def scripted(seed, **options):
    return FakeEngine(SeededScript(seed, vocab_size=50, stop_token=STOP, mean_length=12), **options)


async def decoded(engine, *, budget, resume_routing="append", **options):
    trajectory = opened(resume_routing)
    decoder = make_decoder(engine, **options)
    return trajectory, await decoder.decode(trajectory, max_new_tokens=budget), decoder


class CannedEngine:
    """Answers with given outputs, whatever is asked."""

    def __init__(self, *outputs):
        self.outputs = list(outputs)
        self.requests = []

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        self.requests.append(request)
        return [self.outputs.pop(0)]


def output(*tokens, reason):
    return TokenOutput(
        token_ids=np.asarray(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        routed_experts=None,
        weights=fake_weights(0),
        stop_reason=reason,
        replica="canned",
    )


async def decode_canned(*outputs, budget=10):
    trajectory = Trajectory(routing=None)
    trajectory.observe(PROMPT)
    engine = CannedEngine(*outputs)
    reason = await make_decoder(engine).decode(trajectory, max_new_tokens=budget)
    return trajectory, reason, engine


schedules = st.lists(
    st.builds(lambda after, publishes: (after, publishes), after=st.integers(0, 5), publishes=st.integers(0, 2)),
    max_size=12,
)


@settings(deadline=None)
@given(
    seed=st.integers(0, 200),
    budget=st.integers(1, 30),
    schedule=schedules,
    stride=st.integers(1, 40),
    resume_routing=st.sampled_from(["append", "force"]),
)
def test_any_schedule_of_aborts_and_updates_gives_the_uninterrupted_tokens_and_rows_of_the_right_forward(
    seed, budget, schedule, stride, resume_routing
):
    version, interruptions = 0, []
    for after, publishes in schedule:
        version += publishes
        interruptions.append(Interruption(after=after, load=version))

    async def both():
        plain, plain_reason, _ = await decoded(scripted(seed), budget=budget)
        engine = scripted(seed, interruptions=interruptions)
        broken, reason, decoder = await decoded(
            engine, budget=budget, segment_tokens=stride, resume_routing=resume_routing
        )
        return plain, plain_reason, broken, reason, decoder, engine

    plain, plain_reason, broken, reason, decoder, engine = asyncio.run(both())

    assert reason is plain_reason
    assert broken.token_ids().tolist() == plain.token_ids().tolist()
    assert loss_mask(broken).tolist() == loss_mask(plain).tolist()
    assert broken.num_sampled <= budget
    assert broken.num_rows == len(broken) - 1
    assert broken.sequences()[-1].routed_experts.tolist() == true_rows(broken).tolist()
    assert sum(len(s.routed_experts.experts) for s in broken.segments) == len(broken) - 1  # each row came once
    starts = [*(len(request.token_ids) for request in engine.requests), len(broken)]
    for request in engine.requests:  # prompt + tokens so far, under the original budget
        assert request.max_new_tokens == min(stride, len(PROMPT) + budget - len(request.token_ids))
    partial = [
        end - start < request.max_new_tokens
        for request, (start, end) in zip(engine.requests, pairwise(starts), strict=True)
    ]
    assert decoder.num_aborts == sum(partial[:-1]), "the end of a stride is no abort"


async def test_a_turn_in_strides_is_several_requests_and_no_abort():
    engine = FakeEngine(SeededScript(1, vocab_size=50, stop_token=STOP, mean_length=10_000))
    trajectory, reason, decoder = await decoded(engine, budget=10, segment_tokens=4)
    assert (reason, decoder.num_aborts) == (StopReason.LENGTH, 0)
    assert [len(segment) for segment in trajectory.segments] == [4, 4, 2]
    assert [len(request.token_ids) for request in engine.requests] == [7, 11, 15]


async def test_a_failure_after_a_stride_costs_the_tokens_of_that_stride_alone():
    engine = FakeEngine(
        SeededScript(1, vocab_size=50, stop_token=STOP, mean_length=10_000),
        fail=lambda r: ReplicaLostError("fake-0 died") if len(r.token_ids) > len(PROMPT) + 4 else None,
    )
    trajectory = opened()
    with pytest.raises(ReplicaLostError):
        await make_decoder(engine, segment_tokens=4).decode(trajectory, max_new_tokens=20)
    assert (trajectory.num_sampled, trajectory.num_rows) == (8, len(trajectory) - 1)


async def test_an_abort_before_the_first_token_appends_no_segment():
    engine = scripted(1, interruptions=[Interruption(after=0), Interruption(after=0, load=3)])
    trajectory, _, decoder = await decoded(engine, budget=4)
    assert decoder.num_aborts == 2
    assert [s.weights.version for s in trajectory.segments] == [3]
    assert set(row_versions(trajectory.sequences()[-1])[:-1].tolist()) == {3}


async def test_an_abort_after_the_last_token_of_the_budget_is_a_length_stop():
    trajectory, reason, engine = await decode_canned(output(7, 8, reason=StopReason.ABORT), budget=2)
    assert (reason, trajectory.num_sampled, len(engine.requests)) == (StopReason.LENGTH, 2, 1)


@pytest.mark.parametrize("named", [StopReason.ABORT, StopReason.LENGTH, StopReason.STOP])
async def test_a_last_token_that_is_a_stop_token_is_a_stop_whatever_the_engine_calls_it(named):
    trajectory, reason, engine = await decode_canned(output(7, STOP, reason=named))
    assert (reason, trajectory.num_sampled, len(engine.requests)) == (StopReason.STOP, 2, 1)


async def test_a_stop_without_tokens_right_after_an_abort_ends_the_turn():
    trajectory, reason, _ = await decode_canned(output(7, reason=StopReason.ABORT), output(reason=StopReason.STOP))
    assert (reason, trajectory.num_sampled, len(trajectory.segments)) == (StopReason.STOP, 1, 1)


async def test_an_empty_generation_ends_the_turn_with_no_segment():
    trajectory, reason, _ = await decode_canned(output(reason=StopReason.STOP))
    assert (reason, trajectory.segments) == (StopReason.STOP, [])


async def test_context_overflow_in_the_engine_ends_the_turn_with_length():
    trajectory, reason, _ = await decoded(scripted(1, context_length=len(PROMPT) + 2), budget=20)
    assert reason is StopReason.LENGTH
    assert trajectory.num_sampled <= 2


async def test_an_error_stop_keeps_its_tokens_and_fails_the_rollout():
    trajectory = Trajectory(routing=None)
    trajectory.observe(PROMPT)
    decoder = make_decoder(CannedEngine(output(7, 8, reason=StopReason.ERROR)))
    with pytest.raises(RolloutError, match="replica canned gave up on request s#0"):
        await decoder.decode(trajectory, max_new_tokens=5)
    assert trajectory.num_sampled == 2


async def test_a_failure_keeps_the_segments_before_it():
    engine = scripted(
        1,
        interruptions=[Interruption(after=1)],
        fail=lambda r: EngineError("replica fake-0 died") if len(r.token_ids) > len(PROMPT) else None,
    )
    trajectory = opened()
    with pytest.raises(EngineError, match="died"):
        await make_decoder(engine).decode(trajectory, max_new_tokens=9)
    assert trajectory.num_sampled == 1
    assert trajectory.num_rows == len(trajectory) - 1


async def test_an_engine_that_hangs_is_an_engine_error_that_names_the_request_and_the_limit():
    engine = scripted(1)
    await engine.pause()
    with pytest.raises(EngineError, match=r"request s#0\. got no answer in 0\.01 s \(limits\.generate_timeout_s\)"):
        await decoded(engine, budget=5, generate_timeout_s=0.01)


async def test_a_time_out_raised_by_the_engine_itself_passes_unchanged():
    engine = scripted(1, fail=lambda _: TimeoutError("the engine's own"))
    with pytest.raises(TimeoutError, match="the engine's own"):
        await decoded(engine, budget=5)


@settings(deadline=None)
@given(
    sessions=st.lists(st.text(alphabet="st-1.", max_size=4), min_size=2, max_size=2, unique=True),
    aborts=st.integers(0, 12),
)
def test_no_request_id_is_a_prefix_of_another(sessions, aborts):
    async def ids():
        seen = []
        for session in sessions:
            engine = scripted(3, interruptions=[Interruption(after=0)] * aborts)
            await decoded(engine, budget=3, session=session)
            seen += [r.request_id for r in engine.requests]
        return seen

    seen = asyncio.run(ids())
    assert not [(a, b) for a in seen for b in seen if a is not b and b.startswith(a)]


def test_a_session_with_the_separator_is_refused():
    with pytest.raises(ValueError, match="session is 'a#1'; \"#\" separates"):
        make_decoder(scripted(1), session="a#1")


def test_a_prompt_without_room_to_answer_is_refused_before_any_request():
    limits = TurnLimits(max_turns=1, max_tokens=len(PROMPT))
    with pytest.raises(PromptError, match=r"prompt 4 has 7 tokens and limits\.max_tokens is 7"):
        observe_prompt(Trajectory(routing=None), PROMPT, index=4, limits=limits)


def test_a_trajectory_that_was_begun_with_another_prompt_is_refused():
    limits = TurnLimits(max_turns=1, max_tokens=50)
    observe_prompt(started := opened(), PROMPT, index=4, limits=limits)
    assert len(started.turns) == 1
    with pytest.raises(RolloutError, match="prompt 4 holds 7 tokens that begin with another prompt"):
        observe_prompt(started, PROMPT + 1, index=4, limits=limits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_turns", 0),
        ("max_tokens", 0),
        ("max_new_tokens_per_turn", 0),
        ("segment_tokens", 0),
        ("tool_timeout_s", 0),
        ("generate_timeout_s", float("inf")),
        ("reward_timeout_s", -1),
        ("max_refused_answers", -1),
    ],
)
def test_bad_limits_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"limits\.{field} is {value}"):
        TurnLimits(**({"max_turns": 1, "max_tokens": 10} | {field: value}))
