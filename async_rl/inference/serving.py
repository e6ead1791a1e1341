"""Settings that every engine has, and the checks of a checkpoint that do not depend on the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from agent_loop.bounds import Count, bounded
from async_rl.weights.model_info import ModelInfo

ASSUMED_GPU_BYTES = 80e9  # of an H100, where this machine has no GPU to ask
Device = Literal["cpu", "cuda"]


@bounded("engine")
class ServingConfig:
    """Settings of a replica that do not depend on its engine."""

    ACCEPTED_ARGS: ClassVar[frozenset[str]]
    """Names that `extra_args` may have."""
    TIED_FAMILIES: ClassVar[tuple[str, ...]]
    """Model families whose lm_head the engine ties to the embedding."""

    name: str
    """Name of the engine: vllm or sglang."""
    replicas: Count = 1
    """Number of replicas of the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine; `auto` is the GPU if one is reserved for a replica (cluster.gpus_per_replica)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of weights and activations: float32, bfloat16 or float16."""
    max_model_len: Annotated[int, Ge(2)] = 1024
    """Most tokens of prompt and reply together."""
    max_num_seqs: Count = 64
    """Most requests in one engine step, of each data-parallel group."""
    max_num_batched_tokens: Count = 2048
    """Most tokens in one engine step, of each data-parallel group; for SGLang, in one prefill step."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.85
    """Share of a GPU's memory for weights, their twin and K/V, in (0, 1]."""
    twin_bytes: Annotated[int, Ge(0)] = 0
    """Bytes of this share that the engine leaves to the twin of a rank's weights; a run with `sync.mode=staged` sets
    it."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Data type of K/V; `auto` is `dtype`. With 8 bits, on a GPU only, engine and trainer differ more: the run ends if
    that exceeds the bound of its probe (`mismatch`)."""
    tensor_parallel: Count = 1
    """Tensor-parallel ranks of each data-parallel group of a replica."""
    data_parallel: Count = 1
    """Groups of ranks in one replica. Each decodes its own requests with all of attention; all share the experts."""
    expert_parallel: Count = 1
    """Ranks that the experts of a layer are spread over: all ranks of a replica, or 1 to split each expert instead."""
    nodes: Count = 1
    """Nodes of one replica, each with the same number of its ranks."""
    enforce_eager: bool | None = None
    """Whether CUDA graphs are off; None uses them on a GPU."""
    threads: Count = 1
    """OpenMP threads of one engine process."""
    seed: int = 0
    """Seed of the engine's random state."""
    load_timeout_s: Annotated[float, Gt(0)] = 120.0
    """Bound on one control call, such as a weight load, in seconds."""
    start_timeout_s: Annotated[float, Gt(0)] = 180.0
    """Bound on the start of the engine, in seconds."""
    extra_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the engine, under the engine's own names; only those in ACCEPTED_ARGS."""

    def __post_init__(self) -> None:
        if self.expert_parallel not in (1, self.ranks):
            raise ValueError(
                f"engine.expert_parallel is {self.expert_parallel}; use engine.tensor_parallel x engine.data_parallel "
                f"= {self.ranks} to spread the experts over all ranks of a replica, or 1 to split each expert"
            )
        if self.ranks % self.nodes or max(self.nodes, self.data_parallel) % min(self.nodes, self.data_parallel):
            raise ValueError(
                f"engine.nodes is {self.nodes} with engine.tensor_parallel={self.tensor_parallel} and "
                f"engine.data_parallel={self.data_parallel}; a node has whole groups, or an equal part of one; use "
                "a divisor of engine.data_parallel, or engine.data_parallel x a divisor of engine.tensor_parallel"
            )
        if refused := sorted(set(self.extra_args) - self.ACCEPTED_ARGS):
            raise ValueError(
                f"engine.extra_args sets {', '.join(refused)}: the replica sets such an argument itself, or it may "
                "change the weights or the distribution of a token, which the trainer could not reproduce; remove it, "
                f"or use a field of engine instead. Accepted: {', '.join(sorted(self.ACCEPTED_ARGS))}"
            )

    def is_eager(self, device: Device) -> bool:
        """Whether the engine runs without graphs."""
        return device == "cpu" if self.enforce_eager is None else self.enforce_eager

    def gpu_share(self) -> float:
        """Share of a GPU of this machine that the engine itself may take: without the twin.

        Raises:
            ValueError: nothing is left.
        """
        share = self.gpu_memory_utilization - (self.twin_bytes / gpu_bytes() if self.twin_bytes else 0.0)
        if share <= 0:
            raise ValueError(
                f"engine.gpu_memory_utilization is {self.gpu_memory_utilization}, and the twin of the "
                f"weights takes {self.twin_bytes / gpu_bytes():.3g} (sync.mode=staged); raise engine.tensor_parallel, "
                "or use sync.mode=at_once"
            )
        return share

    @property
    def ranks(self) -> int:
        """Ranks of one replica, each with its own GPU if the run is on GPUs."""
        return self.tensor_parallel * self.data_parallel


def serving_problems(
    config: ServingConfig, info: ModelInfo, *, checkpoint: Path, fields: Mapping[str, Any], capture_routing: bool
) -> Iterator[str]:
    """Why a replica with this configuration cannot serve a checkpoint, on any engine; each with `engine.field`.

    Args:
        fields: content of the checkpoint's config.json.
        capture_routing: whether the replica returns routing rows.
    """
    if capture_routing and info.routing is None:
        yield (
            f"routing capture is on, but {checkpoint} ({info.family}) is a dense model without routers; "
            "use trainer.router_replay=none"
        )
    if info.tied and info.family not in config.TIED_FAMILIES:
        yield (
            f"engine.name is {config.name!r}, and {checkpoint} ({info.family}) has tie_word_embeddings=true, which "
            f"this engine supports in {', '.join(config.TIED_FAMILIES)} only: it would look for a separate lm_head; "
            "use another engine, or save the checkpoint with an lm_head and tie_word_embeddings=false"
        )
    if config.max_model_len > info.context_length:
        yield (
            f"engine.max_model_len is {config.max_model_len}, more than the {info.context_length} positions of "
            f"{checkpoint}; lower it"
        )
    if config.kv_cache_dtype != "auto" and device_of(config) == "cpu":
        yield f"engine.kv_cache_dtype is {config.kv_cache_dtype} on the CPU, which has `auto` only; use a GPU, or auto"
    yield from _split_problems(config, info, fields)
    yield from _expert_problems(config, info, fields)


def _split_problems(config: ServingConfig, info: ModelInfo, fields: Mapping[str, Any]) -> Iterator[str]:
    """Parts of attention that do not divide over the tensor-parallel ranks of a group."""
    size, heads = config.tensor_parallel, fields.get("num_attention_heads") or 0
    groups = 0 if fields.get("kv_lora_rank") else fields.get("num_key_value_heads") or heads
    asked = f"engine.tensor_parallel is {size}, and the model has"
    if heads % size:
        yield f"{asked} {heads} attention heads (num_attention_heads); use a divisor"
    elif groups and max(groups, size) % min(groups, size):
        yield f"{asked} {groups} key-value heads (num_key_value_heads); use a divisor or a multiple"


def _expert_problems(config: ServingConfig, info: ModelInfo, fields: Mapping[str, Any]) -> Iterator[str]:
    """Experts, or the MLP of a dense model, that do not divide over the ranks of a replica."""
    if info.routing is None:
        for name in ("data_parallel", "expert_parallel"):
            if (value := getattr(config, name)) > 1:
                yield (
                    f"engine.{name} is {value}, and {info.family} has no experts to share; set it to 1, and use "
                    "engine.replicas or engine.tensor_parallel"
                )
    elif (spread := config.expert_parallel) > 1:
        if info.routing.num_experts % spread:
            yield (
                f"engine.expert_parallel is {spread}, and the model has {info.routing.num_experts} experts; use a "
                "divisor, or 1"
            )
        return
    columns = fields.get("moe_intermediate_size" if info.routing else "intermediate_size") or 0
    if columns % config.ranks:
        yield (
            f"engine.tensor_parallel x engine.data_parallel is {config.ranks}, and the model has {columns} columns in "
            "each expert or MLP (intermediate_size); use a divisor, or engine.expert_parallel for experts"
        )


def kv_bytes_per_token(fields: Mapping[str, Any], config: ServingConfig) -> int:
    """Bytes of the keys and values of one token in all layers; 0 if config.json does not have their sizes.

    2 layers of 2 key-value heads with 32 channels in float32: 2 * 2 * 2 * 32 * 4 = 1024.
    """
    heads, layers = fields.get("num_attention_heads"), fields.get("num_hidden_layers", 0)
    if (latent := fields.get("kv_lora_rank")) is not None:
        channels = latent + fields.get("qk_rope_head_dim", 0)
    elif heads:
        channels = 2 * head_size(fields) * (fields.get("num_key_value_heads") or heads)
    else:
        return 0
    width = 1 if config.kv_cache_dtype != "auto" else 4 if config.dtype == "float32" else 2
    return layers * channels * width


def head_size(fields: Mapping[str, Any]) -> int:
    """Channels of an attention head; 0 if config.json does not say."""
    heads = fields.get("num_attention_heads")
    return fields.get("head_dim") or (fields.get("hidden_size", 0) // heads if heads else 0)


def gpu_bytes() -> float:
    """Memory of the first GPU of this machine, without a CUDA context; that of an H100 if it has none."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports] - of the requirements for GPUs
    except ImportError:
        return ASSUMED_GPU_BYTES
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        return float(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).total)
    except nvml.NVMLError:
        return ASSUMED_GPU_BYTES


def device_of(config: ServingConfig) -> Device:
    """The device that `config` selects in this process."""
    if config.device != "auto":
        return config.device
    import torch  # not needed to read or check a configuration

    return "cuda" if torch.cuda.is_available() else "cpu"
