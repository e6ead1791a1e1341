"""Numeric bounds are of the error of float32, and far below the smallest defect that they must show."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.families import FAMILIES
from tests.conformance.reference import gap_with_rows, logprob_gap, reference
from tests.conformance.sglang_support import glm4_moe, mixtral
from tests.helpers import numerics, tiny_models
from tests.parallel.support import (
    assert_equal_gradients,
    largest_difference,
    load_reference,
    make_batch,
    policy_terms,
    reference_step,
    save_tiny_moe,
)

pytestmark = pytest.mark.numerics

MODELS = {
    **{name: partial(tiny_models.tiny_config, name) for name, family in FAMILIES.items() if family.expert_weights},
    "glm4_moe": glm4_moe,
    "mixtral": mixtral,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return tiny_models.spread_model(MODELS[request.param](), seed=0)


class SeenTypes(TorchDispatchMode):
    """Types of the floating-point results of more than one element inside the block."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() > 1:
                self.types.add(tensor.dtype)
        return result


def test_a_float64_forward_computes_nothing_in_float32(model):
    exact, ids = numerics.float64_model(model), torch.arange(3, 23)[None]
    with torch.no_grad(), SeenTypes() as single:
        exact(ids)
    with torch.no_grad(), SeenTypes() as double, numerics.float64_forward():
        exact(ids)
    assert torch.float32 in single.types, "transformers computes some of it in float32"
    assert double.types == {torch.float64}


def test_one_wrong_row_of_routing_is_ten_logprob_bounds_off(model):
    ids = np.random.default_rng(0).integers(3, 117, 60).astype(np.int32)
    expected = reference(model, ids)
    at = np.arange(1, len(ids))
    for layer in range(expected.experts.shape[1]):
        rows = expected.experts.copy()
        rows[20, layer] = np.setdiff1d(np.arange(8), rows[20, layer])[: rows.shape[2]]
        wrong = reference(model, ids, forced=rows).logprobs[at - 1, ids[at]]
        assert logprob_gap(expected, ids, wrong, start=1) > 10


def test_a_tie_of_a_router_ends_the_comparison_and_a_wrong_row_fails_it(model):
    ids = np.random.default_rng(0).integers(3, 117, 60).astype(np.int32)
    expected = reference(model, ids)
    rows = expected.experts.copy()
    rows[20, 0] = (rows[20, 0] + 1) % 8
    other = reference(model, ids, forced=rows)
    at = np.arange(1, len(ids))
    logprobs = other.logprobs[at - 1, ids[at]]
    assert gap_with_rows(expected, ids, logprobs, other.experts[:-1], start=1, first_row=0) == np.inf
    margins = expected.margins.copy()
    margins[20, 0] = 0
    tie = dataclasses.replace(expected, margins=margins)
    assert gap_with_rows(tie, ids, logprobs, other.experts[:-1], start=1, first_row=0) <= 1
    logprobs[10] += 1e-2
    assert gap_with_rows(tie, ids, logprobs, other.experts[:-1], start=1, first_row=0) > 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model, and its update of the default batch."""
    checkpoint = save_tiny_moe(tmp_path_factory.mktemp("numerics") / "model")
    return load_reference(checkpoint), reference_step(
        load_reference(checkpoint), make_batch(), policy_terms(DecoupledPPO())
    )


def test_one_wrong_row_of_routing_is_ten_gradient_bounds_off(trained):
    model, expected = trained
    batch = make_batch()
    batch["routed_experts"][2, 20, 1] = (batch["routed_experts"][2, 20, 1] + 1) % 8
    wrong = reference_step(model, batch, policy_terms(DecoupledPPO()))
    assert largest_difference(wrong.gradients, expected.gradients) > 10 * expected.gradient_bound
    assert abs(wrong.loss - expected.loss) > 10 * expected.loss_bound
    with pytest.raises(AssertionError, match="distance"):
        assert_equal_gradients(wrong.gradients, expected)
