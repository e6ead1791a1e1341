"""Two ranks in every parallel layout give what one rank gives: logprobs, metrics, gradients, weights, restart."""

import math
from dataclasses import replace

import pytest

from async_rl.train.model import ParallelConfig
from tests.parallel.ranks import ADAM, BALANCE, run_balance_case, run_case, run_on_ranks
from tests.parallel.support import (
    TRAINER,
    largest_difference,
    make_batch,
    make_supervised_batch,
    save_tiny_moe,
    start_trainer,
)

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.timeout(400)]

CASES = {
    "data": {},
    "data-distributed-optimizer": {"distributed_optimizer": True},
    "data-unpacked": {"packing": False},
    "tensor": {"parallel": ParallelConfig(tensor=2)},
    "tensor-recompute": {"parallel": ParallelConfig(tensor=2), "recompute": "full"},
    "tensor-expert": {"parallel": ParallelConfig(tensor=2, expert=2, expert_tensor=1)},
    "expert": {"parallel": ParallelConfig(expert=2)},
    "expert-tensor": {"parallel": ParallelConfig(expert_tensor=2)},
    "pipeline": {"parallel": ParallelConfig(pipeline=2)},
    "pipeline-recompute": {"parallel": ParallelConfig(pipeline=2), "recompute": "full"},
    "virtual-pipeline": {"parallel": ParallelConfig(pipeline=2, virtual_pipeline=2), "recompute": "full"},
    "context": {"parallel": ParallelConfig(context=2)},
}
BALANCE_CASES = {
    "balance-tensor": {"parallel": ParallelConfig(tensor=2), **BALANCE},
    "balance-tensor-recompute": {"parallel": ParallelConfig(tensor=2), "recompute": "full", **BALANCE},
    "balance-pipeline": {"parallel": ParallelConfig(pipeline=2), **BALANCE},
    "balance-context": {"parallel": ParallelConfig(context=2), **BALANCE},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_moe(tmp_path_factory.mktemp("layouts") / "model")


@pytest.fixture(scope="module")
def expected(checkpoint):
    trainer = start_trainer(checkpoint, optimizer=ADAM)
    result = run_case(trainer, make_batch())
    trainer.close()
    return result


@pytest.fixture(scope="module")
def results(checkpoint, tmp_path_factory):
    return run_on_ranks(checkpoint, CASES | BALANCE_CASES, tmp_path_factory.mktemp("ranks"), ranks=2)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_changes_nothing(name, results, expected):
    got = results[name]
    assert isinstance(got, dict), got
    assert (got["logprobs"] - expected["logprobs"]).abs().max() <= 1e-5
    for ours, theirs in zip(got["metrics"], expected["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-6) or math.isnan(value), key
    if got["gradients"]:
        assert largest_difference(got["gradients"], expected["gradients"]) <= 1e-4
    assert largest_difference(got["weights"], expected["weights"]) <= 1e-5


@pytest.mark.parametrize("name", BALANCE_CASES)
def test_the_balance_loss_weighs_the_same_in_every_layout(name, results, checkpoint):
    got = results[name]
    assert isinstance(got, dict), got
    trainer = start_trainer(checkpoint, optimizer=ADAM, **BALANCE)
    expected = run_balance_case(trainer, make_supervised_batch())
    trainer.close()
    assert got["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert largest_difference(got["gradients"], expected["gradients"]) <= 1e-4


def test_every_layout_config_is_valid():
    for changes in (CASES | BALANCE_CASES).values():
        replace(TRAINER, ranks=2, **changes)
