"""The decode step that the requests of a run show."""

import numpy as np
import pytest

from async_rl.plan.records import read_records
from async_rl.plan.requests import RequestModel, StepFunction, fit_decode_step
from tests.async_rl.plan.traces import A, B, background, generate, span, write_run

SLOTS = 6


def queue(start, *, rounds):
    """Group 1: requests that are all made at the start; SLOTS run at a time."""
    took = 1000 * (A + B * SLOTS)
    spans = [
        generate(start, start + (number // SLOTS + 1) * took, tokens=1000, trajectory=number)
        for number in range(rounds * SLOTS)
    ]
    return [span("rollout", start, start + rounds * took, group=1), *spans]


def test_requests_that_did_not_queue_tell_how_the_decode_step_grows(tmp_path):
    config = {"engine": {"replicas": 1, "max_num_seqs": SLOTS}}
    run = write_run(tmp_path, [*background(), *queue(100, rounds=40)], config=config)
    model = RequestModel(read_records(run))
    assert model.running > SLOTS
    assert (model.decode_s, model.decode_s_per_request) == (pytest.approx(A, rel=0.02), pytest.approx(B, rel=0.02))


def test_prefills_stretch_requests_and_not_the_decode_step(tmp_path):
    spans, at, decoding_s = [*background()], 100.0, 1000 * (A + B)
    for group in range(1, 101):
        took = decoding_s * (1.2 if group % 2 else 1)
        spans += [span("rollout", at, at + took, group=group), generate(at, at + took, tokens=1000, group=group)]
        at += took
    model = RequestModel(read_records(write_run(tmp_path, spans)))
    assert (model.decode_s, model.decode_s_per_request) == (pytest.approx(A, rel=0.02), pytest.approx(B, rel=0.05))
    together_s = sum(1000 * n * (A + B * n) for n in range(1, 7))  # requests of `background`
    assert model.stretch == pytest.approx((together_s + 110 * decoding_s) / (together_s + 100 * decoding_s), rel=0.01)


def test_gaps_between_turns_are_without_pauses_and_aborts(tmp_path):
    spans = [*background(), span("rollout", 100, 140, group=1), span("pause", 112, 113, process="replica-0")]
    spans += [
        generate(100, 110, tokens=10),
        generate(115, 120, tokens=10, aborted=True),
        generate(125, 130, tokens=10),
        generate(132, 140, tokens=10),
    ]
    model = RequestModel(read_records(write_run(tmp_path, spans)))
    assert [gap for gap in model.gaps if gap] == pytest.approx([4, 2])


def test_requests_without_duration_do_not_count():
    start, end = np.array([0.0, 0, 0, 1, 2, 1.5]), np.array([1.0, 2, 3, 2, 4, 1.5])
    running, tokens = StepFunction.of_open(start, end), np.array([10.0, 20, 30, 10, 20, 1])

    def fitted(kept):
        times = {"start": start[:kept], "end": end[:kept]}
        return fit_decode_step(tokens[:kept], (end - start)[:kept], **times, running=running, max_running=2)

    assert fitted(6) == fitted(5)
