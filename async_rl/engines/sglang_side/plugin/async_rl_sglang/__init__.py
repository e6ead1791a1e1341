"""What a replica adds to each of SGLang's processes; SGLang calls `register` through its plugin group.

The folder above is on PYTHONPATH of a replica's server and nowhere else, so nothing has to be installed beside SGLang
and the plugin is always of the same source tree as the replica. It sees to six things:

    end with the owner    no process outlives the replica's, however that ends
    proof of loads        the server reports a digest of the tensors it loaded, and checksums of its parameters
    stop tokens           those of the request alone; SGLang either adds the checkpoint's or ignores both
    kept rows             a retracted request keeps the routing rows of the forward passes that sampled
    forced rows           recorded experts are used again where their positions are forwarded again
    cut distributions     top-p, top-k and min-p keep the same tokens on every engine

Hooks are named by the place in SGLang 0.5.23 that they wrap. SGLang only logs a hook that does not apply, so the server
reports those that do (`loading.report_start`), and the replica refuses a server that reports less.
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
    """Prepare one process of a replica's server."""
    from . import loading, owner, routing, sampling

    owner.end_with(int(os.environ[OWNER_VARIABLE]), folder=os.environ[FOLDER_VARIABLE])
    if os.environ[DEVICE_VARIABLE] == "cpu":
        _plain_host_memory()
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks = {**loading.HOOKS, **routing.HOOKS, **sampling.HOOKS, STOP_TOKENS: (_none_of_the_checkpoint, "AFTER")}
    for target, (hook, kind) in hooks.items():
        registry.HookRegistry.register(target, hook, registry.HookType[kind])


def _none_of_the_checkpoint(found: set[int], config: Any) -> set[int]:
    del found, config
    return set()


def _plain_host_memory() -> None:
    """The buffer of routing rows asks for pinned memory, which needs a GPU."""
    import torch

    common: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")

    def allocate(dims: Any, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        del options
        return torch.empty(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
