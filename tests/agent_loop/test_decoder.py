import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.decoder import SegmentDecoder, observe_prompt
from agent_loop.engine import SamplingConfig
from agent_loop.loop import TurnLimits
from message_queue.errors import ContractError, EngineError, RolloutError
from message_queue.tokens import StopReason, TokenOutput
from message_queue.trajectory import Trajectory
from tests.helpers.dense import loss_mask
from tests.helpers.fakes import SPEC, FakeEngine, Interruption, SeededScript, fake_weights

STOP = 0
LONG = 16  # a seed that gives 20 tokens and no stop token among them
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


def canned(*outputs):
    """An engine that gives these answers."""
    faults = [lambda _request, _answer, output=output: [output] for output in outputs]
    return scripted(1, routing=None, edge=False, faults=faults)


def output(*tokens, reason):
    return TokenOutput(
        token_ids=np.asarray(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        routed_experts=None,
        weights=fake_weights(0),
        stop_reason=reason,
        replica="canned",
    )


@pytest.mark.parametrize("mode", ["append", "force", "replace", "split"])
async def test_decoder_continues_a_root_and_its_fork_in_turn(mode):
    """The stop token that ends a turn of the root is not looked for in a fork."""
    engine = FakeEngine(SeededScript(1, vocab_size=50, stop_token=STOP, mean_length=60))
    root, decoder = opened(mode), make_decoder(engine, segment_tokens=4)
    assert await decoder.decode(root, max_new_tokens=200) is StopReason.STOP
    fork = root.fork(turns=1)
    for path in (fork, root):
        path.observe(PROMPT)
        assert await decoder.decode(path, max_new_tokens=200) is StopReason.STOP
        assert len(path.turns[-1].segments) > 1 and int(path.turns[-1].segments[-1].token_ids[-1]) == STOP
        assert path.num_rows == len(path) - 1
    assert [np.flatnonzero(loss_mask(s)).size for s in root.sequences()] == [
        sum(turn.num_sampled for turn in root.turns),
        fork.turns[1].num_sampled,
    ]


@pytest.mark.parametrize(
    ("outputs", "budget", "expected"),
    [
        ([output(7, 8, reason=StopReason.ABORT)], 2, StopReason.LENGTH),
        *(([output(7, STOP, reason=r)], 9, StopReason.STOP) for r in (StopReason.ABORT, StopReason.LENGTH)),
        ([output(7, reason=StopReason.ABORT), output(reason=StopReason.STOP)], 9, StopReason.STOP),
        ([output(reason=StopReason.STOP)], 9, StopReason.STOP),
    ],
    ids=["abort at the budget", "abort at a stop token", "length at a stop token", "stop after an abort", "empty"],
)
async def test_decoder_gives_the_true_stop_reason_and_no_empty_segment(outputs, budget, expected):
    trajectory, engine = Trajectory(routing=None), canned(*outputs)
    trajectory.observe(PROMPT)
    assert await make_decoder(engine).decode(trajectory, max_new_tokens=budget) is expected
    assert [len(segment) for segment in trajectory.segments] == [len(o) for o in outputs if len(o)]
    assert len(engine.requests) == len(outputs)


async def test_error_stop_keeps_its_tokens_and_fails_the_rollout():
    trajectory = Trajectory(routing=None)
    trajectory.observe(PROMPT)
    decoder = make_decoder(canned(output(7, 8, reason=StopReason.ERROR)))
    with pytest.raises(RolloutError, match=r"canned.*s#0"):
        await decoder.decode(trajectory, max_new_tokens=5)
    assert trajectory.num_sampled == 2


@pytest.mark.parametrize(
    ("options", "stride"),
    [({"interruptions": [Interruption(after=4)]}, 4096), ({}, 4)],
    ids=["after an abort", "after a stride"],
)
async def test_engine_error_keeps_the_segments_before_it(options, stride):
    engine = scripted(
        LONG,
        fail=lambda r: EngineError("fake-0 died") if len(r.token_ids) > len(PROMPT) else None,
        **options,
    )
    trajectory = opened()
    with pytest.raises(EngineError, match="fake-0"):
        await make_decoder(engine, segment_tokens=stride).decode(trajectory, max_new_tokens=20)
    assert (trajectory.num_sampled, trajectory.num_rows) == (4, len(trajectory) - 1)


async def test_engine_that_hangs_is_an_error_with_request_and_limit():
    engine = scripted(1)
    await engine.pause()
    with pytest.raises(EngineError, match=r"s#0\. .*limits\.generate_timeout_s"):
        await decoded(engine, budget=5, generate_timeout_s=0.01)


async def test_timeout_of_the_engine_itself_passes_unchanged():
    raised = TimeoutError()
    with pytest.raises(TimeoutError) as caught:
        await decoded(scripted(1, fail=lambda _: raised), budget=5)
    assert caught.value is raised


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


def test_session_with_the_separator_is_refused():
    with pytest.raises(ValueError, match="session"):
        make_decoder(scripted(1), session="a#1")


def test_observe_prompt_refuses_closed_other_and_full_trajectories():
    limits, closed, started = TurnLimits(max_turns=1, max_tokens=len(PROMPT) + 1), opened(), opened()
    closed.close(stop_reason=StopReason.STOP, reward=0.0)
    observe_prompt(started, PROMPT, index=4, limits=limits)
    assert len(started.turns) == 1
    for trajectory, prompt, error in (
        (started, PROMPT + 1, RolloutError),
        (closed, PROMPT, ContractError),
        (Trajectory(routing=None), np.append(PROMPT, 1), RolloutError),
    ):
        with pytest.raises(error, match="prompt 4"):
            observe_prompt(trajectory, prompt, index=4, limits=limits)


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
def test_turn_limits_refuse_bad_values_by_name(field, value):
    with pytest.raises(ValueError, match=rf"limits\.{field}"):
        TurnLimits(**({"max_turns": 1, "max_tokens": 10} | {field: value}))
