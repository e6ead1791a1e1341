"""Two ranks in every parallel layout give what one rank gives: logprobs, metrics, gradients, weights, restart."""

from dataclasses import replace

import pytest

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.model import ParallelConfig
from tests.helpers import numerics
from tests.parallel.ranks import ADAM, BALANCE, assert_equal_cases, run_balance_case, run_case, run_on_ranks
from tests.parallel.support import (
    TRAINER,
    assert_equal_gradients,
    load_reference,
    make_batch,
    make_supervised_batch,
    policy_terms,
    reference_step,
    save_tiny_moe,
    start_trainer,
    supervised_terms,
)

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

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
def reference(checkpoint):
    return reference_step(load_reference(checkpoint), make_batch(), policy_terms(DecoupledPPO()))


@pytest.fixture(scope="module")
def results(checkpoint, tmp_path_factory):
    return run_on_ranks(checkpoint, CASES | BALANCE_CASES, tmp_path_factory.mktemp("ranks"), ranks=2)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_changes_nothing(name, results, expected, reference):
    got = results[name]
    assert isinstance(got, dict), got
    assert_equal_cases(got, expected, reference)


@pytest.mark.parametrize("name", BALANCE_CASES)
def test_the_balance_loss_weighs_the_same_in_every_layout(name, results, checkpoint):
    batch = make_batch()
    reference = reference_step(load_reference(checkpoint), batch, supervised_terms, routed=False)
    got = results[name]
    assert isinstance(got, dict), got
    trainer = start_trainer(checkpoint, optimizer=ADAM, **BALANCE)
    expected = run_balance_case(trainer, make_supervised_batch())
    trainer.close()
    assert got["metrics"].keys() == expected["metrics"].keys()
    assert got["metrics"]["tokens"] == expected["metrics"]["tokens"]
    numerics.assert_within(abs(got["metrics"]["loss"] - expected["metrics"]["loss"]), 2 * reference.loss_bound)
    assert_equal_gradients(got["gradients"], reference, expected["gradients"])


def test_every_layout_config_is_valid():
    for changes in (CASES | BALANCE_CASES).values():
        replace(TRAINER, ranks=2, **changes)
