"""Trainers with LoRA adapters, and the same adapters in a transformers model."""

import torch
from torch.nn.utils import parametrize

from async_rl.trainer.model.model import LoraConfig
from tests.parallel.support import checkpoint_names, start_trainer

LORA = LoraConfig(rank=4, alpha=6.0)


def start_lora_trainer(checkpoint, *, lora=LORA, spread=True, **changes):
    """A trainer with adapters; spread: whose B is not zero, so that A has a gradient. On one rank."""
    from async_rl.trainer.model.convert import named_weights

    trainer = start_trainer(checkpoint, lora=lora, **changes)
    if spread:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in named_weights(trainer.model.chunks, adapters=True):
                if name.endswith(".b"):
                    parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return trainer


class _Merged(torch.nn.Module):
    """W + scale * B A for each of the matrices in a weight, one after the other on the rows of dimension -2."""

    def __init__(self, parts, *, scale):
        super().__init__()
        self.matrices = torch.nn.ParameterList([x for part in parts for x in part])
        self.scale = scale

    def forward(self, weight):
        a, b = self.matrices[::2], self.matrices[1::2]
        products = torch.cat([second @ first for first, second in zip(a, b, strict=True)], dim=0)
        return weight + self.scale * products.view(weight.shape)


def add_adapters(model, adapters, *, scale):
    """Merge adapters into a transformers model. Returns names of its parameters -> names of the adapters."""
    names = {}

    def add(module, name, kind, sources):
        parts = [[torch.nn.Parameter(adapters[f"{s}.lora_{m}.weight"].clone()) for m in "AB"] for s in sources]
        parametrize.register_parametrization(module, kind, _Merged(parts, scale=scale))
        places = [f"{s}.lora_{m}.weight" for s in sources for m in "AB"]
        names.update({f"{name}.parametrizations.{kind}.0.matrices.{i}": place for i, place in enumerate(places)})

    modules = dict(model.named_modules())
    old = "mixtral" in model.config.model_type
    for name, module in modules.items():
        if name.endswith(".mlp.experts"):
            block = name.replace(".mlp.", ".block_sparse_moe.") if old else name
            gate, up, down = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
            experts = range(len(module.down_proj))
            add(module, name, "gate_up_proj", [f"{block}.{i}.{p}" for i in experts for p in (gate, up)])
            add(module, name, "down_proj", [f"{block}.{i}.{down}" for i in experts])
        elif f"{name}.lora_A.weight" in adapters:
            add(module, name, "weight", [name])
    assert set(names.values()) == set(adapters)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    return checkpoint_names(model, names)
