"""Objectives over trajectories and over the whole update give on two ranks what they give on one."""

import pytest

from async_rl.trainer.loss.losses import GSPO, M2PO, SequenceMask, SequenceTIS
from async_rl.trainer.model.model import ParallelConfig
from tests.parallel.ranks import ADAM, assert_equal_cases, run_case, run_on_ranks
from tests.parallel.support import (
    load_reference,
    make_batch,
    policy_terms,
    reference_step,
    save_tiny_moe,
    start_trainer,
)

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

# The geometric means of the ratios of these trajectories are from 0.006 to 0.07.
MEANS = GSPO(clip_low=0.2, clip_high=0.28, behaviour_weight_cap=0.02)
# The products of the ratios of these trajectories are from 1e-41 to 1e-6.
PRODUCTS = SequenceTIS(aggregation="group_mean", behaviour_weight_cap=1e-7)
MASK = SequenceMask(aggregation="token_mean", max_sequence_drift=0.1)
MOMENT = M2PO(max_second_moment=1.0)
CASES = {
    "context-gspo": {"parallel": ParallelConfig(context=2), "loss": MEANS},
    "context-sequence-tis": {"parallel": ParallelConfig(context=2), "loss": PRODUCTS},
    "context-sequence-mask": {"parallel": ParallelConfig(context=2), "loss": MASK, "packing": False},
    "context-m2po": {"parallel": ParallelConfig(context=2), "loss": MOMENT},
    "tensor-gspo": {"parallel": ParallelConfig(tensor=2), "loss": MEANS},
    "tensor-fp32-head": {"parallel": ParallelConfig(tensor=2), "loss": MEANS, "fp32_lm_head": True},
    "data-sequence-mask": {"loss": MASK},
    "data-m2po": {"loss": MOMENT},
    "pipeline-m2po": {"parallel": ParallelConfig(pipeline=2), "loss": MOMENT},
    "virtual-pipeline-gspo": {"parallel": ParallelConfig(pipeline=2, virtual_pipeline=2), "loss": MEANS},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_moe(tmp_path_factory.mktemp("objectives") / "model")


@pytest.fixture(scope="module")
def expected(checkpoint):
    """The result of each loss on one rank."""
    results = {}
    for case in CASES.values():
        name = case["loss"].name
        if name not in results:
            trainer = start_trainer(checkpoint, optimizer=ADAM, loss=case["loss"])
            results[name] = run_case(trainer, make_batch())
            trainer.close()
    return results


@pytest.fixture(scope="module")
def results(checkpoint, tmp_path_factory):
    return run_on_ranks(checkpoint, CASES, tmp_path_factory.mktemp("ranks"), ranks=2)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_changes_nothing(name, results, expected, checkpoint):
    got, alone = results[name], expected[CASES[name]["loss"].name]
    assert isinstance(got, dict), got
    reference = reference_step(load_reference(checkpoint), make_batch(), policy_terms(CASES[name]["loss"]))
    assert_equal_cases(got, alone, reference)


def test_the_filters_of_these_cases_touch_some_tokens_and_not_all(expected):
    for name, result in expected.items():
        shares = [v for k, v in result["metrics"][0].items() if k.endswith("/fraction")]
        assert any(0 < share < 1 for share in shares), (name, shares)
