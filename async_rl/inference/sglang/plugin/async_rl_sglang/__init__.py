"""Plugin for SGLang; SGLang calls `register` in each process of a replica's server through its plugin group.

The folder of the plugin is only on the PYTHONPATH of a replica's server. The plugin needs no installation in SGLang's
virtualenv, and always belongs to the same source tree as the replica. It adds seven things:

    end with the owner    every process of the server ends when the replica's process ends
    proof of loads        the server reports a digest of the loaded tensors and contents of its parameters
    stop tokens           only those of the request; SGLang either adds the checkpoint's or ignores both
    kept rows             a retracted request keeps the routing rows of the forward passes that sampled
    forced rows           positions that are recomputed use their recorded experts
    spread experts        expert and attention data parallelism run on the CPU
    cut distributions     top-p, top-k and min-p keep the same tokens on every engine

A hook is named by the function of SGLang 0.5.23 that it wraps. SGLang only logs a hook that does not apply. Therefore
the server reports such hooks (`loading.report_start`), and the replica refuses the server.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

OWNER_VARIABLE = "ASYNC_RL_OWNER_PID"
FOLDER_VARIABLE = "ASYNC_RL_FOLDER"
DEVICE_VARIABLE = "ASYNC_RL_DEVICE"
STOP_TOKENS = "sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id"


def register() -> None:
    """Prepare a process of a replica's server: end it with its owner and register the hooks."""
    from . import experts, loading, owner, routing, sampling

    owner.end_with(int(os.environ[OWNER_VARIABLE]), folder=os.environ[FOLDER_VARIABLE])
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks = {**loading.HOOKS, **routing.HOOKS, **sampling.HOOKS, STOP_TOKENS: (_none_of_the_checkpoint, "AFTER")}
    if os.environ[DEVICE_VARIABLE] == "cpu":
        _plain_host_memory()
        experts.give_padding_a_length()
        hooks |= experts.HOOKS
    for target, (hook, kind) in hooks.items():
        registry.HookRegistry.register(target, hook, registry.HookType[kind])


def _none_of_the_checkpoint(found: set[int], config: Any) -> set[int]:
    del found, config
    return set()


def _plain_host_memory() -> None:
    """Allocate host buffers without pinned memory: this needs a GPU, and the buffer of routing rows requests it."""
    import torch

    common: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")

    def allocate(dims: Any, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        del options
        return torch.empty(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
