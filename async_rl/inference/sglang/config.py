"""Settings of an SGLang replica, the checks of a checkpoint, and the command and environment of the server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from agent_loop.bounds import bounded
from async_rl.inference.nodes import NodePlace
from async_rl.inference.serving import ServingConfig, device_of, serving_problems
from async_rl.weights.model_info import ModelInfo, read_config, read_model_info

SGLANG_VERSION = "0.5.23"  # the plugin's hooks and the parsing of answers are written for this version
VENV_PYTHON = Path(".venv-sglang/bin/python")
PLUGIN_PATH = Path(__file__).parent / "plugin"
CPU_PATH = Path(__file__).parents[2] / "compat" / "sglang"
MAX_KEPT = 1 << 14  # most kept tokens per position that the server returns
LONGEST_FORWARD_S = 600.0  # a forward pass that takes longer hangs
CONTEXT_SLACK = 8  # positions of the context that SGLang reserves
CPU_FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe", "qwen3", "qwen2", "llama")
CPU_BROKEN = {
    "qwen2_moe": "its shared expert's gate is a Triton kernel",
    "qwen3_next": "its shared expert's gate is a Triton kernel",
    "qwen3_5_moe_text": "its shared expert's gate is a Triton kernel",
    "deepseek_v2": "latent attention has no CPU version",
    "deepseek_v3": "latent attention has no CPU version",
    "gpt_oss": "torch_native, its attention without AMX kernels, takes no sinks",
}
FORCED_FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe")  # checked against transformers
TIED_FAMILIES = ("qwen2", "qwen3", "llama")  # SGLang reads tie_word_embeddings in these
ACCEPTED_ARGS = frozenset(  # arguments that change neither the weights nor the distribution of a token
    {
        *("trust_remote_code", "weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints"),
        *("weight_loader_prefetch_num_threads", "weight_loader_drop_cache_after_load"),
        *("page_size", "disable_radix_cache", "radix_eviction_policy", "cpu_offload_gb"),
        *("schedule_policy", "schedule_conservativeness", "max_queued_requests", "prefill_max_requests"),
        *("scheduler_recv_interval", "retraction_policy"),
        *("moe_a2a_backend", "deepep_mode", "dist_timeout", "enable_nccl_nvls", "enable_symm_mem"),
        *("disable_custom_all_reduce", "enable_mscclpp", "numa_node", "base_gpu_id", "gpu_id_step"),
        *("decode_attention_backend", "prefill_attention_backend", "moe_runner_backend", "bf16_gemm_backend"),
        *("triton_attention_num_kv_splits", "triton_attention_reduce_in_fp32", "disable_flashinfer_autotune"),
        *("cuda_graph_max_bs_decode", "cuda_graph_bs_decode", "disable_cuda_graph_padding", "enable_cudagraph_gc"),
        *("enable_deterministic_inference", "enable_fp32_lm_head"),
        *("log_level", "log_level_http", "log_requests", "log_requests_level", "log_requests_format"),
        *("log_requests_target", "show_time_cost", "decode_log_interval", "enable_request_time_stats_logging"),
        *("enable_metrics", "enable_mfu_metrics", "enable_trace", "otlp_traces_endpoint", "crash_dump_folder"),
        *("enable_layerwise_nvtx_marker", "soft_watchdog_timeout", "gc_threshold"),
    }
)
OWN_VARIABLES = frozenset(
    {
        *("PYTHONPATH", "ASYNC_RL_OWNER_PID", "ASYNC_RL_DEVICE", "ASYNC_RL_FOLDER", "TMPDIR", "PYTHONUNBUFFERED"),
        *("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "SGLANG_TIMEOUT_KEEP_ALIVE", "TOKENIZERS_PARALLELISM"),
        *("SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SGLANG_CPU_OMP_THREADS_BIND"),
        *("TORCHDYNAMO_DISABLE", "SGLANG_RETURN_ORIGINAL_LOGPROB"),
    }
)


@bounded("engine")
class SglangConfig(ServingConfig):
    """Settings of one SGLang replica; `extra_args` are server arguments under their Python names."""

    ACCEPTED_ARGS: ClassVar[frozenset[str]] = ACCEPTED_ARGS
    TIED_FAMILIES: ClassVar[tuple[str, ...]] = TIED_FAMILIES

    name: Literal["sglang"] = "sglang"
    """Name of the engine."""
    python: Path | None = None
    """Python interpreter of SGLang's virtualenv; None is `.venv-sglang`, created by `make setup-sglang`."""
    kv_cache_tokens: int | None = None
    """K/V slots, in tokens; None is as many as fit on a GPU, and on the CPU room for 8 requests of full length, or for
    64 if that is no more than 16,384 tokens."""

    def __post_init__(self) -> None:
        ServingConfig.__post_init__(self)
        least = self.max_model_len + CONTEXT_SLACK
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < least:
            raise ValueError(
                f"engine.kv_cache_tokens is {self.kv_cache_tokens}; one request of engine.max_model_len="
                f"{self.max_model_len} needs {least}, and SGLang would truncate it without an error; raise it"
            )


def check_engine(
    config: SglangConfig, *, checkpoint: Path, capture_routing: bool, force_routing: bool = False
) -> ModelInfo:
    """Refuse what SGLang accepts but handles wrongly. For arguments and errors see `select.check_engine`."""
    info = read_model_info(checkpoint)
    fields = read_config(checkpoint)
    problems = [*serving_problems(config, info, checkpoint=checkpoint, fields=fields, capture_routing=capture_routing)]
    if info.has_vision:
        problems.append(
            f"engine.name is 'sglang', and {checkpoint} has a vision tower, with which updates of the text part were "
            "not verified; use engine=vllm"
        )
    if force_routing and not capture_routing:
        problems.append(
            "rollout.resume_routing is 'force' without routing capture, so there is nothing to force; "
            "use trainer.router_replay=R3, or rollout.resume_routing=append"
        )
    if force_routing and info.family not in FORCED_FAMILIES:
        problems.append(
            f"rollout.resume_routing is 'force', but forced routing on SGLang is tested only for "
            f"{', '.join(FORCED_FAMILIES)}, not for {info.family} ({checkpoint}); use append"
        )
    if info.family == "qwen3_moe" and (dense := fields.get("mlp_only_layers")):
        problems.append(
            f"engine.name is 'sglang', but {checkpoint} has mlp_only_layers={dense}, which SGLang ignores in "
            "qwen3_moe: it would serve experts there; use engine=vllm"
        )
    if device_of(config) == "cpu" and info.family not in CPU_FAMILIES:
        why = CPU_BROKEN.get(info.family, f"tested families are {', '.join(CPU_FAMILIES)}")
        problems.append(
            f"engine.name is 'sglang', which does not run {info.family} ({checkpoint}) on the CPU: {why}; "
            "use engine=vllm, or engine.device=cuda"
        )
    if problems:
        raise ValueError("\n".join(problems))
    return info


def server_environment(config: SglangConfig, *, owner: int, folder: Path) -> dict[str, str]:
    """Environment of the server: that of this process without the variables of its virtualenv.

    Args:
        owner: process id; the server ends when this process ends.
        folder: folder for temporary files; it is removed when the server ends.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    on_cpu = device_of(config) == "cpu"
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, (PLUGIN_PATH, *((CPU_PATH,) if on_cpu else ())))),
        "ASYNC_RL_OWNER_PID": str(owner),
        "ASYNC_RL_DEVICE": device_of(config),
        "ASYNC_RL_FOLDER": str(folder),
        "TMPDIR": str(folder),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for CONTEXT_SLACK; requests stay below
        "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",  # a request fails if the server closes its connection
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",  # logprobs of the distribution that was sampled from
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if not on_cpu:
        return {**kept, **own}
    own |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": str(config.threads),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # a compiled embedding of two ranks gave wrong token ids
    }
    if config.ranks > 1:
        own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(i) for i in range(config.ranks))
    return {**kept, **own}


def server_arguments(
    config: SglangConfig,
    checkpoint: Path,
    *,
    port: int,
    served_name: str,
    label: str,
    capture_routing: bool,
    place: NodePlace | None = None,
) -> list[str]:
    """Command-line arguments of `sglang.launch_server`.

    Args:
        served_name: model name that identifies this server.
        label: version label of the first weights in the server's answers.
        capture_routing: whether the server returns routing rows.
        place: of this node; None if the replica has one.
    """
    args: dict[str, Any] = {
        "model_path": str(checkpoint.absolute()),
        "served_model_name": served_name,
        "host": "127.0.0.1",
        "port": port,
        "dtype": config.dtype,
        "context_length": config.max_model_len + CONTEXT_SLACK,
        "max_running_requests": config.max_num_seqs * config.data_parallel,  # SGLang divides it by the groups
        "chunked_prefill_size": config.max_num_batched_tokens * config.data_parallel,  # likewise
        "max_prefill_tokens": config.max_num_batched_tokens,
        "tp_size": config.ranks,  # SGLang's tensor parallelism contains the groups of its attention data parallelism
        "attn_dp_size": config.data_parallel,
        "ep_size": config.expert_parallel,
        "random_seed": config.seed,
        "weight_version": label,
        "enable_return_routed_experts": capture_routing,
        "disable_overlap_schedule": True,  # with it a weight version starts one token early
        "disable_cuda_graph": config.is_eager(device_of(config)),
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "sampling_defaults": "openai",  # sampling comes from the request alone
        "sampling_mask_max_tokens": MAX_KEPT,
        "skip_server_warmup": True,
        "sleep_on_idle": config.data_parallel == 1,  # else an idle one takes a core; groups that sleep delay all calls
        "grammar_backend": "none",
        "watchdog_timeout": LONGEST_FORWARD_S + config.load_timeout_s,  # a freeze is no hang
        "log_level": "warning",
    }
    if place is not None:
        args |= {
            "nnodes": place.size,
            "node_rank": place.index,
            "dist_init_addr": f"{place.leader}:{place.port}",
        }
    return _flags({**args, **_device_arguments(config, capture_routing=capture_routing), **config.extra_args})


def _device_arguments(config: SglangConfig, *, capture_routing: bool) -> dict[str, Any]:
    if device_of(config) == "cuda":
        return {
            "mem_fraction_static": config.gpu_share(),
            "kv_cache_dtype": config.kv_cache_dtype,
            "disable_prefill_cuda_graph": capture_routing,  # a graph bypasses the hook that forces experts
            "max_total_tokens": config.kv_cache_tokens,
        }
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "max_total_tokens": config.kv_cache_tokens or kept_tokens(config),
    }


def kept_tokens(config: SglangConfig) -> int:
    """K/V slots on the CPU; lengths of 256 and 4,096 tokens give 16,384 and 32,832."""
    each = config.max_model_len + CONTEXT_SLACK
    return max(8 * each, min(64 * each, 1 << 14))


def _flags(args: Mapping[str, Any]) -> list[str]:
    """`--name value` for each argument. A True flag has no value; False and None are omitted."""
    flags: list[str] = []
    for name, value in args.items():
        if value is not False and value is not None:
            values = [] if value is True else value if isinstance(value, list | tuple) else [value]
            flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    return flags
