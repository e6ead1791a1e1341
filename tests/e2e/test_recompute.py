"""Parts of a layer that are recomputed: gradients stay the same, and fewer activations wait for the backward pass."""

import contextlib
from typing import get_args

import pytest
import torch

from async_rl.trainer.forward_backward import activations_on_host
from async_rl.trainer.model.model import LoraConfig, RecomputeModule, TrainerConfig
from tests.e2e.families import Family
from tests.helpers import tiny_models
from tests.parallel.support import MARKS, assert_same, gradients

pytestmark = MARKS

LENGTHS = (63, 49, 71, 54)
MODELS = {  # a dense layer, latent attention and shared experts; plain attention and experts in all layers
    "deepseek_v3": (
        tiny_models.deepseek_v3_config(),
        ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"),
    ),
    "qwen3_moe": (tiny_models.qwen3_moe_config(mlp_only_layers=[]), ("moe", "moe_act")),
}


class Kept:
    """Bytes that the graph of the first forward pass holds when its backward pass begins."""

    def __init__(self):
        self.bytes, self._storages = 0, []

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def _pack(self, tensor):
        self._storages.append(tensor.untyped_storage())
        return tensor

    def _unpack(self, tensor):
        self.bytes = self.bytes or sum({s.data_ptr(): s.nbytes() for s in self._storages}.values())
        return tensor


def update(family, **settings):
    """Bytes that wait for the backward pass, and the gradients, of one update."""
    with contextlib.closing(family.start(**settings)) as trainer:
        with Kept() as kept:
            trainer.train(family.batch(LENGTHS))
        return kept.bytes, gradients(trainer, adapters="lora" in settings)


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(rank=4, alpha=8)}], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputed_parts_keep_less_and_give_the_same_gradients(name, settings, tmp_path):
    config, modules = MODELS[name]
    family = Family(config, tmp_path)
    whole, expected = update(family, **settings)
    for module in modules:
        kept, found = update(family, recompute="selective", recompute_modules=[module], **settings)
        assert kept < whole, module
        assert_same(found, expected)
    _, expected = update(family, recompute="full", **settings)
    _, found = update(family, recompute="full", offload_activations=True, **settings)
    assert_same(found, expected)


def test_a_tensor_that_waits_on_the_host_is_a_copy_and_a_parameter_is_not():
    weight, given = torch.nn.Parameter(torch.full((3,), 2.0)), torch.full((3,), 5.0, requires_grad=True)
    middle = given * 1
    with activations_on_host():
        product = middle * weight
    with torch.no_grad():
        middle.detach().zero_()
    product.sum().backward()
    assert weight.grad.tolist() == [5.0] * 3 and given.grad.tolist() == [2.0] * 3
    with activations_on_host():
        product = given * weight
    with torch.no_grad():
        weight.data.zero_()
    product.sum().backward()
    assert given.grad.tolist() == [2.0] * 3, "the gradient of the second product is that of the changed parameter"


def test_activations_wait_on_the_host_only_if_layers_are_recomputed():
    with pytest.raises(ValueError, match=r"trainer\.offload_activations is true.*set recompute=full"):
        TrainerConfig(recompute="selective", offload_activations=True)


def test_every_part_is_tested():
    assert {module for *_, modules in MODELS.values() for module in modules} == set(get_args(RecomputeModule))


@pytest.mark.parametrize("modules", [["attention"], ["moe", "moe_act"]])
def test_other_parts_are_refused(modules):
    with pytest.raises(ValueError, match=r"trainer\.recompute_modules has"):
        TrainerConfig(recompute="selective", recompute_modules=modules)
