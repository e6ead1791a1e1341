"""Optimizer state on the CPU: refused without a GPU, and the same training if the CPU poses as a GPU.

The stand-in: weights in the buffers of the model report that they are on a GPU, so that megatron makes its copies and
moves gradients and weights between them. The order of CUDA streams is not tested here.
"""

import pytest
import torch

from async_rl.trainer.state.optimizer import OptimizerConfig
from tests.helpers import numerics
from tests.parallel.resharding import whole_tensors
from tests.parallel.support import MARKS, assert_near, make_batch, start_trainer

pytestmark = [*MARKS, pytest.mark.usefixtures("owner")]

OFFLOAD = OptimizerConfig(lr=1e-3, eps=1e-3, weight_decay=0.01, cpu_offload=1.0)
PLAIN = OptimizerConfig(lr=1e-3, eps=1e-3, weight_decay=0.01)
BFLOAT16 = torch.finfo(torch.bfloat16).eps
SPLIT_BFLOAT16 = {"dtype": "bfloat16", "distributed_optimizer": True}


@pytest.fixture
def said_to_be_gpu(monkeypatch):
    """Weights that are laid out in buffers for gradients and weights say that they are on a GPU."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    storages = set()
    build = _ParamAndGradBuffer.__init__

    def remembering(self, *args, **kwargs):
        build(self, *args, **kwargs)
        storages.update(p.untyped_storage().data_ptr() for p in self.params)

    monkeypatch.setattr(_ParamAndGradBuffer, "__init__", remembering)
    start = HybridDeviceOptimizer.__init__
    monkeypatch.setattr(
        HybridDeviceOptimizer, "__init__", lambda self, *a, **k: start(self, *a, **{**k, "pin_cpu_grads": False})
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: self.untyped_storage().data_ptr() in storages))


def test_offloading_without_a_gpu_is_refused(checkpoint):
    with pytest.raises(ValueError, match="cpu_offload"):
        start_trainer(checkpoint, optimizer=OFFLOAD, **SPLIT_BFLOAT16)


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"distributed_optimizer": True}])
def test_settings_that_megatron_cannot_offload_are_refused(checkpoint, said_to_be_gpu, settings):
    with pytest.raises(ValueError, match=r"cpu_offload.*dtype"):
        start_trainer(checkpoint, optimizer=OFFLOAD, **settings)


def test_offloaded_training_and_its_checkpoints_are_those_without(checkpoint, tmp_path, said_to_be_gpu):
    offloaded = start_trainer(checkpoint, optimizer=OFFLOAD, **SPLIT_BFLOAT16)
    plain = start_trainer(checkpoint, optimizer=PLAIN, **SPLIT_BFLOAT16)
    for part in offloaded._optimizer._parts():
        assert part.optimizer.cpu_optimizers
        assert part.optimizer.gpu_optimizer is None
    metrics = [trainer.train(make_batch(seed=1)) for trainer in (offloaded, plain)]
    assert metrics[0]["grad_norm"] == metrics[1]["grad_norm"] > OFFLOAD.clip_grad
    # Adam is about ten operations; bfloat16 weights are rounded copies and may fall on either side.
    assert_near_states(offloaded, plain, tmp_path / "first", rounding=numerics.rounding(10))
    offloaded.restore(tmp_path / "first" / "plain")
    plain.restore(tmp_path / "first" / "offloaded")
    ours, theirs = (trainer.train(make_batch(seed=2)) for trainer in (offloaded, plain))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=BFLOAT16)  # of weights that may differ in the last bit
    assert_near_states(offloaded, plain, tmp_path / "second", rounding=BFLOAT16)


def assert_near_states(offloaded, plain, folder, *, rounding):
    """Both are saved in `folder`. rounding: relative, of float32 tensors."""
    offloaded.save(folder / "offloaded").result()
    plain.save(folder / "plain").result()
    ours, theirs = whole_tensors(folder / "offloaded"), whole_tensors(folder / "plain")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        relative = BFLOAT16 if tensor.dtype is torch.bfloat16 else rounding
        assert_near(ours[key], tensor, bound=relative * tensor.abs().max().item())
