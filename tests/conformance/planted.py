"""Loads that go wrong although everything was read: planted below the digest of a vLLM worker or an SGLang server.

The server of SGLang loads this file as a plugin, from a folder that `plugin_folder` makes. Its processes have no
`async_rl` and no `tests`, so neither is imported at module level.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

Tensors = Sequence[tuple[str, Any]]
PLUGIN, FAULT = "planted_loads", "fault"
PARTLY_WRONG = (  # of qwen3_moe; layer 1 has experts
    *(f"stale {part}" for part in (".experts.", "down_proj", "mlp.gate.weight", "o_proj", "k_proj", "q_norm")),
    *(f"stale {part}" for part in ("embed_tokens", "lm_head", "input_layernorm", "model.norm", "layers.1.")),
    *(f"stale layers.1.mlp.experts.3.{part}" for part in ("", "up_proj", "down_proj")),
    "swapped .experts.0. .experts.1.",
    "swapped layers.1.self_attn.o_proj layers.2.self_attn.o_proj",
)
TRADED = "swapped layers.1.mlp.experts.0.gate_proj layers.1.mlp.experts.0.up_proj"  # in one parameter


class Loads:
    """Tensors that a loader hands to the model in place of the ones that it read."""

    def __init__(self) -> None:
        self._before: Tensors = ()

    def spoiled(self, fault: str, tensors: Tensors) -> Tensors:
        """Tensors for the model.

        stale: the tensors of the load before. stale PART: those whose name has the part, on rank 1 alone with
        stale-on-1. swapped A B: tensors whose names have A and B trade places.
        """
        before, self._before = self._before, [(name, tensor.clone()) for name, tensor in tensors]
        match fault.split():
            case ["none"]:
                return []
            case ["half"]:
                return tensors[: len(tensors) // 2]
            case ["stale"]:
                self._before = before
                return before
            case ["stale" | "stale-on-1" as where, part]:
                old = dict(before if where == "stale" or torch.distributed.get_rank() == 1 else ())
                return [(name, old.get(name, tensor) if part in name else tensor) for name, tensor in tensors]
            case ["swapped", first, second]:
                other = {first: second, second: first}
                either = f"{re.escape(first)}|{re.escape(second)}"
                return [(re.sub(either, lambda found: other[found[0]], name), tensor) for name, tensor in tensors]
            case _:
                return tensors


LOADS = Loads()


def plugin_folder(parent: Path) -> Path:
    """A folder for PYTHONPATH where SGLang finds this file as a plugin; its file `fault` names the fault."""
    folder = parent / PLUGIN
    info = folder / f"{PLUGIN}-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(__file__, folder / f"{PLUGIN}.py")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{PLUGIN} = {PLUGIN}:register\n")
    (folder / FAULT).write_text("")
    return folder


def register() -> None:
    """Called by SGLang in each of its processes."""
    import importlib

    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    target = "sglang.srt.models.qwen3_moe.Qwen3MoeForCausalLM.load_weights"
    registry.HookRegistry.register(target, load_spoiled, registry.HookType["AROUND"])


def load_spoiled(load: Callable[..., Any], model: Any, weights: Iterator[tuple[str, Any]], *args: Any) -> Any:
    """Around the model's load_weights, below the digest: all of `weights` is read."""
    fault = (Path(__file__).parent / FAULT).read_text()
    return load(model, iter(LOADS.spoiled(fault, list(weights))), *args)
