"""The decode step that the requests of a run show."""

import pytest

from async_rl.plan.records import read_records
from async_rl.plan.requests import RequestModel
from tests.async_rl.plan.traces import A, B, background, generate, span, write_run

SLOTS = 6


def queue(start, *, rounds):
    """Group 1: requests that are all made at the start, of which SLOTS run at a time."""
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
