"""Settings that follow from the checkpoint of a run, its task and this machine; presets write them as `${name:...}`.

configs/model/hugging_face.yaml   engine.max_model_len: ${length_of:${model.checkpoint},4096}
config.json of the checkpoint     max_position_embeddings: 2048
the run                           engine.max_model_len: 2048
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from async_rl.weights.model_info import CheckpointError, ModelInfo, read_model_info

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
WARMUP_STEPS = 10


def local_checkpoint(checkpoint: str, *, key: str) -> Path:
    """Folder of a checkpoint that is given as a folder, or as a name at the Hugging Face hub.

    A name, as in `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@main`, is downloaded into the hub's cache once; `HF_HOME`,
    `HF_HUB_OFFLINE` and `HF_TOKEN` count. A text of another form is a folder.

    Args:
        checkpoint: a folder or a name.
        key: its place in the settings, for the error.

    Raises:
        ValueError: neither the hub nor its cache has the model, or the hub cannot be reached.
    """
    folder = Path(checkpoint).expanduser()
    if folder.exists() or not HUB_NAME.fullmatch(checkpoint):
        return folder
    from huggingface_hub import snapshot_download  # takes 0.3 s, and only names need it

    name, _, revision = checkpoint.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the libraries below raise many kinds
        cause = next((line for line in f"{error}".splitlines() if line.strip()), "").strip() or type(error).__name__
        raise ValueError(
            f"{key} is {checkpoint}, no folder here and no model that the Hugging Face hub gave "
            f"({type(error).__name__}: {cause.rstrip('.')}); give a folder, run `hf download {name}` where there is a "
            "network, or set HF_TOKEN for a gated model"
        ) from error


def model_name(checkpoint: str) -> str:
    """The last part of a folder, or of a model's name at the hub.

    .../models--Qwen--Qwen3-0.6B/snapshots/c1899de and Qwen/Qwen3-0.6B are Qwen3-0.6B.
    """
    path = Path(checkpoint.partition("@")[0])
    if path.parent.name == "snapshots":
        return path.parts[-3].rpartition("--")[2]
    return path.name


def run_name(factory: str, checkpoint: str | None = None) -> str:
    """Name of a run from its task and its model.

    `products.py:task` with Qwen/Qwen3-0.6B is products-Qwen3-0.6B; `recipes.math.task:math_task` alone is math.
    """
    module, _, name = factory.rpartition(":")
    path = Path(module)
    if path.suffix == ".pkl":  # of `async_rl.train` with an object
        path, module = Path("task"), "task"
    parts = [*path.parts[-2:-1], path.stem] if path.suffix == ".py" else module.split(".")[-2:]
    task = parts[-1] if parts[-1] != "task" or len(parts) == 1 else parts[-2]
    if path.suffix == ".py" and name != "task":
        task += f"-{name}"
    return re.sub(r"[^\w.-]+", "-", "-".join((task, *((model_name(checkpoint),) if checkpoint else ()))))


def length_of(checkpoint: str, most: int) -> int:
    """Longest sequence in tokens: the model's context, and no more than `most`."""
    info = _info(checkpoint)
    return most if info is None else min(most, info.context_length)


def replay_of(checkpoint: str) -> str:
    """Router replay: R3 for a mixture of experts, none for a dense model."""
    info = _info(checkpoint)
    return "none" if info is not None and info.routing is None else "R3"


def dtype_of(gpus: float) -> str:
    """Data type on processes with this many GPUs."""
    return "bfloat16" if gpus else "float32"


def warmup_of(train_steps: int) -> int:
    """Updates of the warm-up: a tenth of a run, at most 10."""
    return max(0, min(WARMUP_STEPS, train_steps // 10))


def lr_of(lora_rank: int) -> float:
    """Learning rate: 1e-6 for all weights of a model, and ten times that for adapters."""
    return 1e-5 if lora_rank else 1e-6


def tenth_of(lr: float) -> float:
    """Where a decay ends; it follows a learning rate that is overridden."""
    return lr / 10


def gpus_of(address: str | None) -> float:
    """GPUs of a trainer rank: 1.0 in a cluster, and on a machine with GPUs, else 0.0."""
    return 1.0 if address is not None or has_gpus() else 0.0


def has_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> bool:
    """Whether this machine has NVIDIA GPUs that this process may use; torch is not imported."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    found = any(re.fullmatch(r"nvidia\d+", path.name) for path in devices.glob("nvidia*"))
    return found and visible not in ("", "-1")


def _info(checkpoint: str) -> ModelInfo | None:
    """Facts of a checkpoint; None if it cannot be read. The checks of a run report that."""
    try:
        return read_model_info(Path(checkpoint).expanduser())
    except CheckpointError:
        return None


def _or(function: Callable[..., Any], otherwise: object) -> Callable[..., Any]:
    """The function, with a result for values of the wrong type; the checks of their fields name them."""

    def resolve(*values: Any) -> Any:
        try:
            return function(*values)
        except (TypeError, AttributeError):
            return otherwise

    return resolve


RESOLVERS: Mapping[str, Callable[..., Any]] = {
    "run_name": _or(run_name, "run"),
    "length_of": _or(length_of, 4096),
    "replay_of": _or(replay_of, "none"),
    "dtype_of": _or(dtype_of, "float32"),
    "warmup_of": _or(warmup_of, 0),
    "lr_of": _or(lr_of, 1e-6),
    "tenth_of": _or(tenth_of, 0.0),
    "gpus_of": _or(gpus_of, 0.0),
    "teacher_length": lambda served, rollout: max(served, rollout + 1),  # engines keep a place for a sampled token
}
