"""Conditions of long runs: clipping, weight decay, float32 weights next to bfloat16 ones, constant memory."""

import ctypes
import gc
import resource
import weakref

import psutil
import pytest
import torch

from async_rl.trainer.state.optimizer import OptimizerConfig
from tests.helpers import numerics
from tests.helpers.tiny_models import qwen2_moe_config, qwen3_moe_config, save_checkpoint
from tests.parallel.resharding import whole_tensors
from tests.parallel.support import MARKS, make_batch, start_trainer

pytestmark = [*MARKS, pytest.mark.usefixtures("owner")]


def state_after_a_step(trainer, folder, batch=None):
    metrics = trainer.train(make_batch(seed=1) if batch is None else batch)
    trainer.save(folder).result()
    return metrics, whole_tensors(folder)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("bound", [0.0, 0.5, 1e6], ids=["off", "active", "loose"])
def test_the_gradient_of_all_weights_together_is_clipped(checkpoint, tmp_path, bound, split):
    adam = OptimizerConfig(lr=1e-3, betas=(0.9, 0.95), clip_grad=bound)
    trainer = start_trainer(checkpoint, optimizer=adam, distributed_optimizer=split)
    metrics, state = state_after_a_step(trainer, tmp_path / "state")
    # After the first update exp_avg is (1 - beta1) times the gradient that Adam was given.
    first = [t for name, t in state.items() if name.startswith("optimizer.exp_avg.")]
    used = torch.stack([t.double().norm() for t in first]).norm().item() / 0.1
    assert metrics["grad_norm"] > 0.5
    expected = bound if bound == 0.5 else metrics["grad_norm"]
    # A norm is a sum of squares in float32, tensor by tensor.
    assert used == pytest.approx(expected, rel=numerics.rounding(max(t.numel() for t in first)))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_weight_decay_spares_norms_and_biases(tmp_path, split):
    config = qwen2_moe_config(num_hidden_layers=2)
    model = save_checkpoint(config, tmp_path / "model", seed=3, vectors=True)
    adam = OptimizerConfig(lr=0.1, weight_decay=0.5)
    trainer = start_trainer(model, optimizer=adam, distributed_optimizer=split, router_replay="none")
    trainer.save(tmp_path / "before").result()
    batch = make_batch(routed=False)
    batch["advantages"] = torch.zeros(6)
    _, after = state_after_a_step(trainer, tmp_path / "after", batch)
    before = whole_tensors(tmp_path / "before")
    weights = {name: t for name, t in before.items() if not name.startswith("optimizer.")}
    assert {1, 2} <= {t.dim() for t in weights.values()}
    for name, tensor in weights.items():
        factor = 1.0 if tensor.dim() == 1 else 0.95
        # Adam rounds a few times: the factor, the product, and the update of zero.
        assert torch.allclose(after[name], factor * tensor, rtol=numerics.rounding(4)), name


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_an_update_is_one_fused_kernel_per_weight(checkpoint, split, monkeypatch):
    calls, fused = [], torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *given, **options: calls.append(1) or fused(*given, **options))
    trainer = start_trainer(checkpoint, optimizer=OptimizerConfig(lr=1e-3), distributed_optimizer=split)
    trainer.train(make_batch(seed=1))
    assert calls


def test_memory_of_large_tensors_is_used_for_the_next_ones(checkpoint):
    start_trainer(checkpoint)

    def use():
        torch.empty(16 << 20, dtype=torch.float32).fill_(1)  # 64 MiB

    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(16):
        use()
    # New memory has 16,384 pages each time. Other blocks of a process that ran many tests may take some of the old.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 8 * 16384


def test_updates_too_small_for_bfloat16_are_kept_in_float32(checkpoint, tmp_path):
    adam = OptimizerConfig(lr=1e-6)
    trainer = start_trainer(checkpoint, optimizer=adam, dtype="bfloat16")
    trainer.save(tmp_path / "before").result()
    before = whole_tensors(tmp_path / "before")
    _, after = state_after_a_step(trainer, tmp_path / "after")
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    exact = after[f"optimizer.float32.{name}"]
    assert (exact != before[f"optimizer.float32.{name}"]).float().mean() > 0.9
    assert (after[name] == before[name]).float().mean() > 0.9
    assert torch.equal(after[name], exact.bfloat16())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    config = qwen3_moe_config(num_hidden_layers=2, hidden_size=32, intermediate_size=32, moe_intermediate_size=16)
    return save_checkpoint(config, tmp_path_factory.mktemp("small") / "model", seed=3)


def small_batch():
    return make_batch((9, 7, 8), layers=1)


def test_memory_does_not_grow_over_350_steps(small):
    """Any object kept per step shows, or 60 KB (the activations of a micro-batch are 300 KB here)."""
    trainer = start_trainer(small, optimizer=OptimizerConfig(), router_replay="R3")
    batch, held = small_batch(), {}
    for step in range(1, 351):
        trainer.train(batch.clone())
        trainer.timeline.take()  # as with each answer to the driver
        if step in (50, 350):
            held[step] = live_memory()
    growth = {key: held[350][key] - held[50][key] for key in held[350]}
    assert growth["tensors"] == 0, growth
    assert growth["objects"] < 300, growth
    assert growth["bytes"] < 300 * 60_000, growth


def live_memory():
    """Tensors and objects that are alive, and the resident memory without the reserve of malloc."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    objects = gc.get_objects()
    tensors = sum(issubclass(type(held), torch.Tensor) for held in objects)
    return {"tensors": tensors, "objects": len(objects), "bytes": psutil.Process().memory_info().rss}


def test_a_trainer_that_is_dropped_without_being_closed_is_freed(small):
    trainer = start_trainer(small)
    trainer.train(small_batch())
    layer = weakref.ref(trainer.model.chunks[0].decoder.layers[1])
    del trainer
    gc.collect()
    assert layer() is None
