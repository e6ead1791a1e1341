"""Each mode of resume_routing from request to training sequences, on an engine whose rows name their version."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.decoder import SegmentDecoder
from agent_loop.engine import SamplingConfig
from agent_loop.loop import TurnLimits
from message_queue.trajectory import Trajectory
from tests.helpers.dense import loss_mask
from tests.helpers.fakes import SPEC, FakeEngine, Interruption, SeededScript, fake_row
from tests.helpers.stored import stored

STOP = 99
MODES = ("append", "force", "replace", "split")


async def rolled_out(mode, interruptions, *, budget=8, turns=2):
    """A trajectory of some turns, and the first position that each request asked for."""
    script = SeededScript(3, vocab_size=50, stop_token=STOP, mean_length=1000)
    engine = FakeEngine(script, interruptions=interruptions)
    limits = TurnLimits(max_turns=turns, max_tokens=turns * (3 + budget), generate_timeout_s=10)
    decoder = SegmentDecoder(
        engine, sampling=SamplingConfig(), stop_token_ids=(STOP,), session="s", cache_salt="", limits=limits
    )
    made = Trajectory(routing=SPEC, resume_routing=mode)
    for _ in range(turns):
        made.observe(np.arange(3, dtype=np.int32))
        await decoder.decode(made, max_new_tokens=budget)
    return made, engine, {len(request.token_ids) for request in engine.requests}


def placed(trajectory):
    """(start, end, version) of every segment."""
    at, found = 0, []
    for turn in trajectory.turns:
        at += len(turn.observation)
        for segment in turn.segments:
            found.append((at, at + len(segment), segment.weights.version))
            at += len(segment)
    return found


def views(trajectory, requests):
    """For every segment the version of each row that its request had in the engine, up to the segment's end."""
    view, found = [], []
    for start, end, version in placed(trajectory):
        if start in requests:
            view = []
        view = [*view, *[version] * (end - 1 - len(view))]
        found.append((start, end, view))
    return found


def expected_sequences(trajectory, requests):
    """[(versions of rows, positions in the loss)], the mode spelled out on lists."""
    mode = trajectory.resume_routing
    made = [([], [])]
    for start, end, view in views(trajectory, requests):
        rows, loss = made[-1]
        if mode in ("append", "force"):
            rows += view[len(rows) :]
        elif mode == "replace" or rows == view[: len(rows)]:
            rows[:] = view
        else:
            made.append((list(view), loss := []))
        loss += range(start, end)
    return made


interruptions = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 1), st.booleans()), max_size=5)


def schedule_of(drawn):
    """Interruptions whose loads count up."""
    version, schedule = 0, []
    for after, load, goes_on in drawn:
        version += load
        schedule.append(Interruption(after=after, load=version, goes_on=goes_on))
    return schedule


@settings(deadline=None)
@given(mode=st.sampled_from(MODES), drawn=interruptions)
def test_training_sequences_have_the_rows_of_the_sampling_requests(mode, drawn):
    made, _, requests = asyncio.run(rolled_out(mode, schedule_of(drawn)))
    tokens = made.token_ids().tolist()
    made = asyncio.run(stored(made))
    expected = expected_sequences(made, requests)
    assert len(made.sequences()) == len(expected)
    for sequence, (versions, loss) in zip(made.sequences(), expected, strict=True):
        assert np.flatnonzero(loss_mask(sequence)).tolist() == loss
        assert sequence.token_ids.tolist() == tokens[: len(sequence)]
        assert np.all(sequence.routed_experts[len(versions) :] == -1)
        for position, row_version in enumerate(versions):
            true = np.sort(fake_row(tokens[position], position, row_version, SPEC))
            assert np.array_equal(np.sort(sequence.routed_experts[position]), true)


@pytest.mark.parametrize(("mode", "sequences"), [("append", 1), ("force", 1), ("replace", 1), ("split", 2)])
def test_resume_routing_of_an_update_between_two_requests(mode, sequences):
    made, engine, _ = asyncio.run(rolled_out(mode, [Interruption(after=4, load=1)]))
    resumed = engine.requests[1]
    assert resumed.existing_rows == (6 if mode in ("append", "force") else 0)
    assert (resumed.forced_experts is not None) == (mode == "force")
    assert len(made.sequences()) == sequences
    rows = sum(len(segment.routed_experts.experts) for segment in made.segments)
    assert (rows == len(made) - 1) == (mode in ("append", "force")), "each row comes once, or again with each request"
