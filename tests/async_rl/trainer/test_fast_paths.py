"""Which faster ways of megatron are used, by layout and device."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from async_rl.trainer.model.model import ParallelConfig, TrainerConfig, rank_environment


@pytest.mark.parametrize(
    ("ranks", "parallel", "overlaps"),
    [
        (1, {}, False),
        (2, {}, True),
        (2, {"tensor": 2}, False),
        (2, {"tensor": 2, "expert": 2, "expert_tensor": 1}, False),
        (2, {"tensor": 2, "expert_tensor": 1}, True),  # both ranks have all experts
        (2, {"context": 2}, True),
        (2, {"expert": 2}, True),  # the dense weights
        (2, {"pipeline": 2}, False),
        (4, {"pipeline": 2}, True),
    ],
)
def test_gradients_overlap_if_several_ranks_have_the_same_weights(ranks, parallel, overlaps):
    config = TrainerConfig(ranks=ranks, parallel=ParallelConfig(**parallel))
    assert config.sums_gradients == overlaps
    split = max(parallel.get("tensor", 1), parallel.get("context", 1)) > 1
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in rank_environment(config)) == split


def test_fused_kernels_are_used_on_devices_that_have_them(monkeypatch):
    from async_rl.trainer.model import gpt

    def used(device, *, fused_permutation=False, **megatron):
        monkeypatch.setattr(gpt.moe_utils, "HAVE_TE", fused_permutation)
        monkeypatch.setattr(
            gpt.moe_utils, "fused_sort_chunks_by_index_with_probs", fused_permutation or None, raising=False
        )
        return tuple(gpt.fusions(SimpleNamespace(megatron=megatron), torch.device(device)).values())

    assert used("cpu") == used("cpu", fused_permutation=True) == (False, False)
    assert used("cuda") == (False, True)
    assert used("cuda", add_bias_linear=True) == used("cuda", glu_linear_offset=1.0) == (False, False)
    assert used("cuda", fused_permutation=True) == (True, True)


@pytest.mark.parametrize(("gpus", "threads"), [(0, 4), (2, 8), (64, 1)])
def test_a_rank_has_its_share_of_the_cores(monkeypatch, gpus, threads):
    from async_rl.trainer import rank

    monkeypatch.setattr(rank.os, "sched_getaffinity", lambda _pid: set(range(16)))
    monkeypatch.setattr(rank.Path, "glob", lambda _path, _pattern: iter(range(gpus)))
    config = TrainerConfig(ranks=4)
    assert rank.threads_of(config) == threads
    assert rank.threads_of(replace(config, threads=3)) == 3
    with pytest.raises(ValueError, match=r"trainer\.threads is 0"):
        replace(config, threads=0)
