"""The operations of a train step are those that torch counts in the trainer."""

import contextlib
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.flops import peak_of, train_operations
from async_rl.trainer.model.model import LoraConfig
from async_rl.trainer.planning import Planner
from tests.e2e.families import Family
from tests.helpers import tiny_models
from tests.helpers.loop_experts import loop_experts
from tests.parallel.support import TRAINER, WARNINGS, make_batch, start_trainer, training_batch_of

pytestmark = WARNINGS

LENGTHS = (128, 64, 64)  # no attention bucket and no chunk has padding
MODELS = {
    **{family: partial(tiny_models.tiny_config, family) for family in tiny_models.FAMILIES},
    "deepseek_v3 without a query vector": partial(tiny_models.tiny_config, "deepseek_v3", q_lora_rank=None),
}


def runs_of(lengths):
    """The runs of sequences that share nothing."""
    return np.stack([np.zeros_like(lengths), lengths], axis=1)


def by_query(attention, q, k, v):
    """RowAttention._attend without sinks, one query at a time, so that only pairs that are not masked are counted."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    found = []
    for i in range(q.shape[2]):
        keys = slice(max(0, i + 1 - attention.window) if attention.window else 0, i + 1)
        scores = q[:, :, i : i + 1] @ k[:, :, keys].transpose(2, 3) * attention.scale
        found.append(scores.softmax(-1) @ v[:, :, keys])
    return torch.cat(found, dim=2)


def by_token(q, k, v, decay, beta, *, chains):
    """gated_delta_rule as its recurrence, so that only its own products are counted."""
    from async_rl.trainer.model import attention

    shape = (v.shape[1], v.shape[2], k.shape[-1], v.shape[-1])
    state = torch.zeros(chains.waves[0], *shape, requires_grad=True)  # as if there were tokens before
    found = []
    for wave, columns in enumerate(zip(*(x.split(chains.waves) for x in (q, k, v, decay, beta)), strict=True)):
        state = attention.to_slots(state, chains.continued[wave - 1]) if wave else state
        for i in range(chains.size):
            query, key = (x[:, :, None, i : i + 1] for x in columns[:2])
            value, kept, strength = (x[:, :, :, i, None] for x in columns[2:])
            state = state * kept.unsqueeze(-1).exp()
            state = state + key.transpose(-1, -2) @ (strength.unsqueeze(-1) * (value - key @ state))
            found.append(query @ state * key.shape[-1] ** -0.5)
    outputs = [torch.cat(found[i * chains.size : (i + 1) * chains.size], dim=-2) for i in range(len(chains.waves))]
    return torch.cat(outputs)


def grouped(rows, weights, *_args, **_kwargs):
    """Operations of a grouped product, [r, n] with [e, n, m], or its gradient for the weights, [n, r] with [r, m]."""
    return 2 * rows[0] * rows[1] * weights[-1]


def counted_and_expected(config, folder, *, lengths=LENGTHS, **settings):
    """Operations of a train step by torch and by train_operations."""
    from async_rl.trainer.model import delta_net
    from async_rl.trainer.model.attention import RowAttention

    family = Family(config, folder)
    batch = training_batch_of(family.batch(lengths))
    with contextlib.nullcontext() if config.model_type == "gpt_oss" else loop_experts():  # its experts have biases
        trainer = family.start(**{"micro_batch_tokens": 150, **settings})
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped})
    with contextlib.closing(trainer):
        attention = mock.patch.object(RowAttention, "_attend", by_query)
        with attention, mock.patch.object(delta_net, "gated_delta_rule", by_token), counter:
            trainer.train(batch)
        expected = train_operations(
            trainer.model.shape,
            runs_of(batch.lengths),
            num_loss_tokens=int(batch.num_loss_tokens.sum()),
            lora=settings.get("lora", LoraConfig()),
        )
        return counter.get_total_flops(), expected


@pytest.mark.parametrize("name", MODELS)
def test_operations_of_a_train_step_are_those_that_torch_counts(name, tmp_path):
    counted, expected = counted_and_expected(MODELS[name](), tmp_path)
    assert counted == pytest.approx(expected, rel=2e-4)  # the metrics add 360 operations for each token in the loss


@pytest.mark.parametrize("modules", [(), ("q_proj", "down_proj")], ids=["all", "some"])
def test_operations_with_adapters_leave_out_gradients_of_frozen_weights(modules, tmp_path):
    lora = LoraConfig(rank=1, target_modules=modules)
    config = tiny_models.qwen3_moe_config(vocab_size=1000)
    counted, expected = counted_and_expected(
        config, tmp_path, lengths=(360, 210, 210), lora=lora, micro_batch_tokens=1000
    )
    assert counted == pytest.approx(expected, rel=1e-2)  # the merging of adapters adds less


def test_speed_is_that_of_the_forwarded_sequences_on_each_rank(checkpoint):
    padded = make_batch()
    padded["informative"] = torch.arange(6) < 4
    batch = training_batch_of(padded)
    trainer = start_trainer(checkpoint, peak_flops=1e9, loss=DecoupledPPO(count="informative"))
    plan = Planner(config=TRAINER, loss=DecoupledPPO(count="informative")).policy(batch)
    operations = train_operations(
        trainer.model.shape,
        runs_of(batch.lengths[:4]),
        num_loss_tokens=int(batch.num_loss_tokens[:4].sum()),
        lora=LoraConfig(),
    )
    with mock.patch.object(trainer, "_config", replace(TRAINER, ranks=4, peak_flops=1e9)):
        found = trainer.throughput(plan, seconds=2.0)
    assert found == {
        "throughput/train_tflops": pytest.approx(operations / 8e12),
        "throughput/mfu": pytest.approx(operations / 8e9),
    }
    assert start_trainer(checkpoint).throughput(plan, seconds=2.0).keys() == {"throughput/train_tflops"}
    assert trainer.throughput(replace(plan, updates=[None]), seconds=2.0) == {}
    trainer.close()


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_peak_is_that_of_the_whole_device(device, peak):
    assert peak_of(device) == peak
