"""Parts of a layer that are recomputed: gradients stay the same, and fewer activations wait for the backward pass."""

from typing import get_args

import pytest
import torch

from async_rl.trainer.forward_backward import activations_on_host
from async_rl.trainer.model.model import LoraConfig, RecomputeModule, TrainerConfig
from tests.helpers import tiny_models
from tests.parallel.support import MARKS, gradients, make_batch, start_trainer

pytestmark = MARKS

LENGTHS = (63, 49, 71, 54)
MODELS = {  # a dense layer, latent attention and shared experts; plain attention and experts in all layers
    "deepseek_v3": (
        tiny_models.deepseek_v3_config,
        1,
        ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"),
    ),
    "qwen3_moe": (lambda: tiny_models.qwen3_moe_config(mlp_only_layers=[]), 0, ("moe", "moe_act")),
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


def update(checkpoint, layers, **settings):
    """Bytes that wait for the backward pass, and the gradients, of one update."""
    trainer = start_trainer(checkpoint, router_replay="R3", **settings)
    try:
        with Kept() as kept:
            trainer.train(make_batch(LENGTHS, layers=layers))
        return kept.bytes, gradients(trainer, adapters="lora" in settings)
    finally:
        trainer.close()


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(rank=4, alpha=8)}], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputed_parts_keep_less_and_give_the_same_gradients(name, settings, tmp_path):
    make, dense, modules = MODELS[name]
    config = make()
    checkpoint = tiny_models.save_checkpoint(config, tmp_path, seed=1)
    layers = config.num_hidden_layers - dense
    whole, expected = update(checkpoint, layers, **settings)
    for module in modules:
        kept, found = update(checkpoint, layers, recompute="selective", recompute_modules=[module], **settings)
        assert kept < whole, module
        for key, gradient in expected.items():
            assert torch.equal(found[key], gradient), (module, key)


@pytest.mark.parametrize("name", MODELS)
def test_inputs_of_layers_that_wait_on_the_host_give_the_same_gradients(name, tmp_path):
    make, dense, _ = MODELS[name]
    config = make()
    checkpoint = tiny_models.save_checkpoint(config, tmp_path, seed=1)
    layers = config.num_hidden_layers - dense
    _, expected = update(checkpoint, layers, recompute="full")
    _, found = update(checkpoint, layers, recompute="full", offload_activations=True)
    for key, gradient in expected.items():
        assert torch.equal(found[key], gradient), key


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
