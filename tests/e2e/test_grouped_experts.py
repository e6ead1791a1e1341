"""Grouped experts give the results of experts in a loop, with a number of kernels that no number of experts changes."""

import contextlib
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from async_rl.trainer.model.model import LoraConfig
from async_rl.trainer.state.optimizer import OptimizerConfig
from tests.e2e.families import Family
from tests.helpers import tiny_models
from tests.helpers.loop_experts import loop_experts
from tests.parallel.support import MARKS, exported, gradients

pytestmark = MARKS

GRADIENTS = 2e-6  # |grouped - loop| / |loop|, all gradients as one vector
ADAM = OptimizerConfig(lr=1e-2, eps=1e-3)
MODELS = {
    "deepseek_v3": tiny_models.deepseek_v3_config,
    "mixtral": tiny_models.mixtral_config,
    "qwen3_moe": tiny_models.qwen3_moe_config,
}


@contextlib.contextmanager
def started(family, *, loop=False, **settings):
    with loop_experts() if loop else contextlib.nullcontext():
        trainer = family.start(optimizer=ADAM, **settings)
    with contextlib.closing(trainer):
        yield trainer


def experts_of(trainer):
    from async_rl.trainer.model.experts import GroupedExperts

    return [module for module in trainer.model.chunks[0].modules() if isinstance(module, GroupedExperts)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(rank=4, alpha=8)}, {"dtype": "bfloat16"}], ids=str)
def test_grouped_experts_train_as_experts_in_a_loop(name, settings, tmp_path):
    family, found = Family(MODELS[name](), tmp_path), []
    batch = family.batch()
    for loop in (True, False):
        with started(family, loop=loop, **settings) as trainer:
            assert bool(experts_of(trainer)) is not loop
            logprobs = trainer.logprobs(batch)
            loss = trainer.train(batch)["loss"]
            whole = gradients(trainer, adapters="lora" in settings)
            found.append((logprobs, loss, whole, exported(trainer)))
    (old_logprobs, old_loss, old, _), (logprobs, loss, new, weights) = found
    assert torch.equal(logprobs, old_logprobs) and loss == old_loss
    assert new.keys() == old.keys() and weights.keys() == found[0][3].keys()
    flat = [torch.cat([grads[key].double().flatten() for key in sorted(new)]) for grads in (new, old)]
    assert float((flat[0] - flat[1]).norm() / flat[1].norm()) <= GRADIENTS


class Calls(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [[3, 0, 5, 2] * 4, [0] * 16, [0, 0, 0, 9] + [0] * 12], ids=["some", "none", "one"])
def test_kernels_do_not_depend_on_the_number_of_experts(tokens, tmp_path):
    counts = []
    for number in (4, 16):
        config = tiny_models.qwen3_moe_config(num_experts=number, num_hidden_layers=1, mlp_only_layers=[])
        with started(Family(config, tmp_path / str(number))) as trainer:
            (experts,) = experts_of(trainer)
            rows = sum(tokens[:number])
            hidden = torch.randn(rows, config.hidden_size, requires_grad=True)
            with Calls() as calls:
                output, bias = experts(hidden, torch.tensor(tokens[:number]), torch.rand(rows))
                output.backward(torch.ones_like(output))
            assert output.shape == hidden.shape and bias is None
            assert hidden.grad is not None and all(torch.isfinite(p.main_grad).all() for p in experts.parameters())
            counts.append(calls.counts)
    assert counts[0] == counts[1]
