"""Settings of a vLLM replica, the checks of a checkpoint, and the arguments and environment of the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from agent_loop.bounds import Count, bounded
from async_rl.inference.nodes import NodePlace
from async_rl.inference.serving import Device, ServingConfig, device_of, head_size, kv_bytes_per_token, serving_problems
from async_rl.inference.vllm.plugin import PLUGIN_VARIABLE
from async_rl.weights.model_info import ModelInfo, read_config, read_model_info
from message_queue.tokens import RoutingSpec

BLOCK_MULTIPLE = 32  # vLLM's CPU attention kernels need a multiple of this
CPU_MLA_BLOCK = 16  # the only block its CPU MLA decode kernel is compiled for
FORCED_FAMILIES = (  # their forced routing is that of transformers
    *(
        "qwen3_moe",
        "qwen2_moe",
        "qwen3_next",
        "qwen3_5_moe_text",
        "mixtral",
        "olmoe",
        "deepseek_v3",
        "glm4_moe",
        "glm4_moe_lite",
    ),
    "gpt_oss",
)
GPT_OSS_EPS = 1e-5  # of the norms that vLLM builds for gpt-oss
TIED_FAMILIES = ("qwen2", "qwen3", "qwen3_5_text", "llama", "qwen2_moe", "qwen3_moe", "mixtral")  # vLLM ties in these
MTP_FAMILIES = ("deepseek_v3", "glm4_moe")  # their layers for multi-token prediction are kept in a trained checkpoint
NGRAMS = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}  # most tokens that a repetition is found by
ACCEPTED_ARGS = frozenset(  # arguments that change neither the weights nor the distribution of a token
    {
        *("trust_remote_code", "safetensors_load_strategy", "safetensors_prefetch_num_threads"),
        *("enable_prefix_caching", "prefix_caching_hash_algo", "num_gpu_blocks_override", "cpu_offload_gb"),
        *("max_num_scheduled_tokens", "long_prefill_token_threshold", "enable_chunked_prefill", "scheduling_policy"),
        *("scheduler_reserve_full_isl", "prefill_schedule_interval", "async_scheduling", "watermark"),
        *("all2all_backend", "disable_custom_all_reduce", "distributed_timeout_seconds"),
        *("numa_bind", "numa_bind_nodes", "numa_bind_cpus", "max_parallel_loading_workers"),
        *("attention_backend", "moe_backend", "disable_cascade_attn", "enable_flashinfer_autotune"),
        *("compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level"),
        *("enable_log_requests", "log_level", "show_hidden_metrics_for_version", "kv_cache_metrics"),
        *("cudagraph_metrics", "otlp_traces_endpoint", "collect_detailed_traces", "enable_layerwise_nvtx_tracing"),
        *("enable_mfu_metrics", "enable_logging_iteration_details", "profiler_config", "shutdown_timeout"),
    }
)
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on the CPU
CPU_DELTA_NET_SIZES = (64, 128)  # channels of heads of gated delta nets in bfloat16, as tested
CPU_VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several replicas would bind to the same cores
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs its worker in its own process
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first requests wait seconds for compilation
}
CUDA_VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "1"}  # the only GPU runner that returns routed experts
OWN_VARIABLES = frozenset(
    {
        PLUGIN_VARIABLE,
        "VLLM_NO_USAGE_STATS",
        "VLLM_LOGGING_LEVEL",
        "OMP_NUM_THREADS",
        "NUMBA_NUM_THREADS",
        *CPU_VARIABLES,
        *CUDA_VARIABLES,
    }
)


@bounded("engine.speculation")
class Speculation:
    """Draft tokens that the engine verifies in one forward pass; the distribution of the tokens is that of the model.

    Drafts that the model does not sample are forgotten: neither rows nor logprobs nor K/V are left.
    """

    method: Literal["ngram", "mtp"]
    """Where drafts come from: the tokens that followed the last few tokens earlier in the sequence, or the
    checkpoint's layers for multi-token prediction."""
    tokens: Count = 3
    """Most drafts in one forward pass of a request."""


@bounded("engine")
class VllmConfig(ServingConfig):
    """Settings of one vLLM replica; `extra_args` are fields of vLLM's AsyncEngineArgs."""

    ACCEPTED_ARGS: ClassVar[frozenset[str]] = ACCEPTED_ARGS
    TIED_FAMILIES: ClassVar[tuple[str, ...]] = TIED_FAMILIES

    name: Literal["vllm"] = "vllm"
    """Name of the engine."""
    kv_cache_bytes: Count | None = None
    """K/V memory on the CPU, in bytes; None is room for 4 x max_num_seqs requests of full length, at most 2 GiB, at
    least 64 MiB and for one request."""
    block_size: Count | None = None
    """Tokens per K/V block; None is 32 on the CPU, and vLLM's choice on a GPU or for multi-head latent attention."""
    speculation: Speculation | None = None
    """Draft tokens; None is one token for each forward pass."""

    def __post_init__(self) -> None:
        ServingConfig.__post_init__(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"engine.max_num_batched_tokens is {self.max_num_batched_tokens}, less than "
                f"engine.max_num_seqs={self.max_num_seqs}; a step decodes one token per request, so raise it"
            )
        if self.block_size is not None and self.block_size % CPU_MLA_BLOCK:
            raise ValueError(
                f"engine.block_size is {self.block_size}; must be a multiple of {BLOCK_MULTIPLE} "
                f"({CPU_MLA_BLOCK} for latent attention on the CPU), or null for the right one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A checked checkpoint that a replica serves."""

    checkpoint: Path
    """Hugging Face checkpoint folder."""
    info: ModelInfo
    """Facts read from the checkpoint's config."""
    latent_attention: bool
    """Whether the model has multi-head latent attention (MLA), as DeepSeek-V3."""
    routing: RoutingSpec | None
    """Shape of the rows that the engine returns; None if it captures none."""
    kv_cache_bytes: int
    """K/V memory on the CPU, in bytes."""
    unforcible: str | None
    """Why the engine cannot use forced experts; None if it can."""


def check_engine(
    config: VllmConfig, *, checkpoint: Path, capture_routing: bool, force_routing: bool = False
) -> ServedModel:
    """Refuse what vLLM accepts but handles wrongly. For arguments and errors see `select.check_engine`."""
    info = read_model_info(checkpoint)
    fields = read_config(checkpoint)
    device = device_of(config)
    unforcible = _why_unforcible(device, info, capture_routing=capture_routing)
    problems = [
        *serving_problems(config, info, checkpoint=checkpoint, fields=fields, capture_routing=capture_routing),
        *(_cpu_problems(config, info, fields, capture_routing=capture_routing) if device == "cpu" else ()),
    ]
    if info.family == "gpt_oss":
        problems += _gpt_oss_problems(config, fields)
    if config.speculation is not None:
        problems += _draft_problems(config, config.speculation, info, fields)
    if force_routing and unforcible is not None:
        problems.append(f"forced routing is asked for, but {unforcible}; use rollout.resume_routing=append")
    if problems:
        raise ValueError("\n".join(problems))
    return ServedModel(
        checkpoint=checkpoint,
        info=info,
        latent_attention=bool(fields.get("kv_lora_rank")),
        routing=info.routing if capture_routing else None,
        kv_cache_bytes=config.kv_cache_bytes or _kv_cache_bytes(config, fields),
        unforcible=unforcible,
    )


def _cpu_problems(
    config: VllmConfig, info: ModelInfo, fields: Mapping[str, Any], *, capture_routing: bool
) -> Iterator[str]:
    """Settings that vLLM's CPU worker handles wrongly or refuses."""
    latent = bool(fields.get("kv_lora_rank"))
    if capture_routing and not config.is_eager("cpu"):
        yield (
            "engine.enforce_eager is false with routing capture on the CPU, where compiled graphs return wrong expert "
            "ids without an error; set engine.enforce_eager=true, or trainer.router_replay=none"
        )
    if config.tensor_parallel > 1 and config.data_parallel > 1:
        yield (
            f"engine.tensor_parallel is {config.tensor_parallel} with engine.data_parallel={config.data_parallel} on "
            "the CPU, where vLLM cannot gather the expert ids of a group; set one of them to 1"
        )
    if not latent and (size := head_size(fields)) not in (0, *CPU_HEAD_SIZES):
        yield (
            f"engine.name is 'vllm', whose attention on the CPU has no heads of {size} channels (head_dim), only of "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; use another model, or engine=sglang"
        )
    if config.dtype != "float32" and (problem := _delta_net_problem(config, fields)) is not None:
        yield problem
    if config.block_size is not None and latent and config.block_size != CPU_MLA_BLOCK:
        yield (
            f"engine.block_size is {config.block_size}, but latent attention ({info.family}) on the CPU has "
            f"kernels for {CPU_MLA_BLOCK} only; set {CPU_MLA_BLOCK} or null"
        )
    if config.block_size is not None and not latent and config.block_size % BLOCK_MULTIPLE:
        yield (
            f"engine.block_size is {config.block_size}; attention on the CPU needs a multiple of "
            f"{BLOCK_MULTIPLE}, or null for {BLOCK_MULTIPLE}"
        )
    needed = _request_bytes(config, fields)
    if config.kv_cache_bytes is not None and needed > config.kv_cache_bytes:
        yield (
            f"engine.kv_cache_bytes is {config.kv_cache_bytes}, and the K/V of one request of engine.max_model_len="
            f"{config.max_model_len} tokens takes {needed}; raise it, or lower engine.max_model_len"
        )


def _gpt_oss_problems(config: VllmConfig, fields: Mapping[str, Any]) -> Iterator[str]:
    """Values of the model's config that vLLM's gpt-oss does not read, and the dtype whose sinks become old."""
    asked = "engine.name is 'vllm', and the checkpoint is gpt_oss with"
    if (eps := fields.get("rms_norm_eps", GPT_OSS_EPS)) != GPT_OSS_EPS:
        yield f"{asked} rms_norm_eps={eps}, but vLLM builds its norms with {GPT_OSS_EPS}; use another model"
    rope: Mapping[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if (kind := rope.get("rope_type") or rope.get("type")) != "yarn":
        yield f"{asked} rope_type={kind!r}, but vLLM builds this family with yarn; use another model"
    if unread := sorted(rope.keys() & {"attention_factor", "mscale", "mscale_all_dim"}):
        yield f"{asked} {', '.join(unread)} in its rope_parameters, which vLLM ignores in this family; leave it out"
    if config.dtype == "float16" and device_of(config) == "cpu":
        yield (
            f"{asked} engine.dtype=float16 on the CPU, where vLLM's attention copies the sinks once and keeps the old "
            "ones after an update; use float32 or bfloat16"
        )


def _draft_problems(
    config: VllmConfig, speculation: Speculation, info: ModelInfo, fields: Mapping[str, Any]
) -> Iterator[str]:
    """Drafts that the engine cannot make, or whose acceptance was not verified."""
    asked = f"engine.speculation.method is {speculation.method}"
    if speculation.method == "mtp":
        layers = fields.get("num_nextn_predict_layers") or 0
        if info.family not in MTP_FAMILIES:
            yield (
                f"{asked}, and the model family is {info.family}, whose layers for multi-token prediction are served "
                f"in {', '.join(MTP_FAMILIES)} only; use ngram"
            )
        elif not layers:
            yield f"{asked}, and the checkpoint has no such layers (num_nextn_predict_layers); use ngram"
        elif speculation.tokens % layers:
            yield (
                f"engine.speculation.tokens is {speculation.tokens} with {layers} layers for multi-token prediction; "
                "use a multiple"
            )
    if "linear_key_head_dim" in fields:
        yield f"{asked}, and the state of gated delta nets after rejected drafts was not verified; omit it"
    if device_of(config) == "cuda":
        yield f"{asked} on a GPU, where the rows of rejected drafts were not verified; omit engine.speculation"
    if config.data_parallel > 1:
        yield (
            f"{asked} with engine.data_parallel={config.data_parallel}: groups whose steps have different numbers of "
            "drafts were not verified; set engine.data_parallel=1, or omit engine.speculation"
        )


def _delta_net_problem(config: VllmConfig, fields: Mapping[str, Any]) -> str | None:
    """What the CPU kernels of gated delta nets, which are not for float32, do not take; None without such layers."""
    if "linear_key_head_dim" not in fields:
        return None
    if config.dtype != "bfloat16":
        return f"engine.dtype is {config.dtype}, but gated delta nets on the CPU take bfloat16 or float32; set one"
    sizes = {name: fields[name] for name in ("linear_key_head_dim", "linear_value_head_dim")}
    if set(sizes.values()) <= {*CPU_DELTA_NET_SIZES}:
        return None
    return (
        f"engine.dtype is {config.dtype}, and the model has {', '.join(f'{n}={size}' for n, size in sizes.items())}; "
        f"gated delta nets on the CPU have kernels for {', '.join(map(str, CPU_DELTA_NET_SIZES))} only; set "
        "engine.dtype=float32"
    )


def _kv_cache_bytes(config: VllmConfig, fields: Mapping[str, Any]) -> int:
    """K/V memory on the CPU if no size is given: 128 requests of 256 tokens with 1 KiB each have 128 MiB."""
    each = _request_bytes(config, fields)
    return max(64 << 20, each, min(4 * config.max_num_seqs * each, 2 << 30))


def _request_bytes(config: VllmConfig, fields: Mapping[str, Any]) -> int:
    """Bytes of the keys and values of one request of full length, on one rank."""
    if config.speculation is not None and config.speculation.method == "mtp":
        layers = fields.get("num_hidden_layers", 0) + (fields.get("num_nextn_predict_layers") or 0)
        fields = {**fields, "num_hidden_layers": layers}
    return config.max_model_len * kv_bytes_per_token(fields, config) // config.tensor_parallel


def _why_unforcible(device: Device | None, info: ModelInfo, *, capture_routing: bool) -> str | None:
    if not capture_routing:
        return "routing capture is off"
    if device == "cuda":
        return f"engine.device is {device}, and routers are forced in vLLM's CPU worker only"
    if info.family not in FORCED_FAMILIES:
        return f"the model family is {info.family}, and routers are forced in {', '.join(FORCED_FAMILIES)} only"
    return None


def process_environment(config: VllmConfig) -> dict[str, str]:
    """Environment variables that a replica's process needs at its start; torch reads OMP_NUM_THREADS on import."""
    return {
        PLUGIN_VARIABLE: "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        "OMP_NUM_THREADS": str(config.threads),  # more threads than cores cost a factor of ten
        "NUMBA_NUM_THREADS": "1",  # n-grams are found by one thread; others that wait for it cost a factor of ten
    }


def device_environment(config: VllmConfig) -> dict[str, str]:
    """Environment variables for the device of this process; they must be set before it imports vLLM."""
    return dict(CUDA_VARIABLES if device_of(config) == "cuda" else CPU_VARIABLES)


def engine_environment(config: VllmConfig) -> dict[str, str]:
    """`process_environment` and `device_environment` together; `start_vllm` checks them."""
    return process_environment(config) | device_environment(config)


def gpu_args(config: VllmConfig) -> dict[str, Any]:
    """Fields of AsyncEngineArgs for a replica on GPUs."""
    args: dict[str, Any] = {"gpu_memory_utilization": config.gpu_share(), "kv_cache_dtype": config.kv_cache_dtype}
    return args if config.block_size is None else {**args, "block_size": config.block_size}


def engine_args(
    config: VllmConfig,
    model: ServedModel,
    *,
    capture_routing: bool,
    capture_support: bool = False,
    place: NodePlace | None = None,
) -> dict[str, Any]:
    """Fields of vLLM's AsyncEngineArgs.

    Args:
        capture_routing: whether the engine returns routing rows.
        capture_support: whether requests may sample from a part of the vocabulary.
        place: of this node; None if the replica has one.

    Raises:
        ValueError: engine.extra_args overrides an argument that the replica needs on this device.
    """
    args: dict[str, Any] = {
        "model": str(model.checkpoint),
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "tensor_parallel_size": config.tensor_parallel,
        "data_parallel_size": config.data_parallel,
        "enable_expert_parallel": config.expert_parallel > 1,
        "enforce_eager": config.is_eager(device_of(config)),
        "seed": config.seed,
        "worker_extension_cls": "async_rl.inference.vllm.worker.LoadsUpdates",
        "logprobs_mode": "processed_logprobs",  # logprobs of the distribution that was sampled from
        "max_logprobs": -1,  # a teacher returns as many as distillation.top_k
        "enable_return_routed_experts": capture_routing,
        "return_sampling_mask": capture_support,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # sampling comes from the request alone
        "disable_log_stats": True,
    }
    if model.info.has_vision:
        args["language_model_only"] = True  # without the vision tower, which no update reaches
    if config.speculation is not None:
        args |= draft_args(config.speculation)
    if config.ranks > 1:
        args["distributed_executor_backend"] = "mp"  # vLLM would choose Ray's inside a placement group
    if place is not None:
        args |= {
            "nnodes": place.size,
            "node_rank": place.index,
            "master_addr": place.leader,
            "master_port": place.port,
            "data_parallel_rpc_port": place.port + 1,
        }
    args |= gpu_args(config) if device_of(config) == "cuda" else cpu_args(config, model)
    if taken := sorted(args.keys() & config.extra_args.keys()):
        raise ValueError(
            f"engine.extra_args sets {', '.join(taken)}, which {model.info.family} on this device needs as "
            f"{args[taken[0]]!r}; leave it out"
        )
    return {**args, **config.extra_args}


def draft_args(speculation: Speculation) -> dict[str, Any]:
    """Further arguments for drafts. Acceptance is vLLM's "standard" rejection sampling, the only exact one."""
    method: dict[str, Any] = {"method": speculation.method, "num_speculative_tokens": speculation.tokens}
    if speculation.method == "ngram":
        method |= NGRAMS
    return {
        "speculative_config": method | {"rejection_sample_method": "standard", "draft_sample_method": "greedy"},
        "per_request_spec_decode_metrics": "summary",
    }


def cpu_args(config: VllmConfig, model: ServedModel) -> dict[str, Any]:
    """Further arguments on the CPU."""
    args: dict[str, Any] = {
        "kv_cache_memory_bytes": model.kv_cache_bytes,  # the default takes nearly all memory of the machine
        "worker_cls": "async_rl.compat.vllm.RoutingCPUWorker",
        "return_sampling_mask": True,  # RoutingCPUWorker returns masks only for requests that need them
    }
    if not model.latent_attention:
        args["block_size"] = config.block_size or BLOCK_MULTIPLE
    else:
        # vLLM's CPU rotary kernel is wrong for the rotary part of latent attention; its torch version is right
        args["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
        if config.dtype == "float32":
            args["attention_backend"] = "CPU_MLA"  # on a CPU with AMX vLLM picks a backend that refuses float32
        if config.block_size is not None:
            args["block_size"] = config.block_size
    return args
