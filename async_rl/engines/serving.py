"""What a replica of any engine is asked to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from async_rl.model_info import ModelInfo, read_model_info

DTYPES = ("float32", "bfloat16", "float16")
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Fields that every engine has; `replicas` of them serve a run.

    device: where the engine runs; `auto` is the GPU if torch sees one in the replica's process.
    max_model_len: most tokens of prompt and reply together.
    gpu_memory_utilization: share of a GPU's memory for weights and K/V.
    enforce_eager: no CUDA graphs.
    threads: OpenMP threads of one engine process.
    load_timeout_s, generate_timeout_s, start_timeout_s: bounds on one weight load, one decode, one start.
    extra_args: further arguments of the engine itself, of those in ACCEPTED_ARGS.
    """

    ENGINE: ClassVar[str]
    ACCEPTED_ARGS: ClassVar[frozenset[str]]
    TIED_FAMILIES: ClassVar[tuple[str, ...]]

    name: str
    replicas: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: str = "float32"
    max_model_len: int = 1024
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.85
    tensor_parallel: int = 1
    enforce_eager: bool = True
    threads: int = 1
    seed: int = 0
    load_timeout_s: float = 120.0
    generate_timeout_s: float = 600.0
    start_timeout_s: float = 180.0
    extra_args: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.name != self.ENGINE:
            raise ValueError(f"engine.name is {self.name!r}; this configuration is of engine {self.ENGINE!r}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"engine.device is {self.device!r}; use auto, cpu or cuda")
        if self.dtype not in DTYPES:
            raise ValueError(f"engine.dtype is {self.dtype!r}; use one of {', '.join(DTYPES)}")
        for name in ("replicas", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} is {getattr(self, name)}; must be >= 1")
        if self.max_model_len < 2:
            raise ValueError(f"engine.max_model_len is {self.max_model_len}; must hold a prompt and a reply, so >= 2")
        for name in ("load_timeout_s", "generate_timeout_s", "start_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"engine.{name} is {getattr(self, name)}; must be > 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"engine.gpu_memory_utilization is {self.gpu_memory_utilization}; it is a share, in (0, 1]"
            )
        if refused := sorted(set(self.extra_args) - self.ACCEPTED_ARGS):
            raise ValueError(
                f"engine.extra_args sets {', '.join(refused)}: the replica sets it itself, or it may change the "
                "weights or the distribution of a token, which the trainer could not reproduce; leave it out, or use "
                f"the field of engine for it. Accepted are {', '.join(sorted(self.ACCEPTED_ARGS))}"
            )


def read_served(config: ServingConfig, checkpoint: Path, *, capture_routing: bool) -> ModelInfo:
    """What a checkpoint is, where a replica can serve it.

    Raises:
        ValueError: the configuration does not suit the checkpoint; names `engine.field`, the value and the way out.
        CheckpointError: the checkpoint cannot be read.
    """
    info = read_model_info(checkpoint)
    if capture_routing and info.routing is None:
        raise ValueError(
            f"routing capture is on, but {checkpoint} ({info.family}) is dense and routes nothing; "
            "use trainer.router_replay=none"
        )
    if info.tied and info.family not in config.TIED_FAMILIES:
        raise ValueError(
            f"engine.name is {config.name!r}, and {checkpoint} ({info.family}) has tie_word_embeddings=true, which "
            f"this engine knows in {', '.join(config.TIED_FAMILIES)} only: it would look for an lm_head of its own; "
            "use another engine, or save the checkpoint with an lm_head and tie_word_embeddings=false"
        )
    if config.max_model_len > info.context_length:
        raise ValueError(
            f"engine.max_model_len is {config.max_model_len}, more than the {info.context_length} positions of "
            f"{checkpoint}; lower it"
        )
    return info


def device_of(config: ServingConfig) -> Device:
    """The device of `config` in this process."""
    if config.device != "auto":
        return config.device
    import torch  # not needed to read or check a configuration

    return "cuda" if torch.cuda.is_available() else "cpu"


def known_device(config: ServingConfig, *, on_this_machine: bool) -> Device | None:
    """The device of `config`, as far as this process knows it; None for `auto` on another machine."""
    return device_of(config) if on_this_machine or config.device != "auto" else None
