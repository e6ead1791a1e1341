"""Short description of a run before it starts: model, layout, batches, memory, and settings far from practice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
from safetensors import safe_open

from async_rl.config import RunConfig
from async_rl.files.masking import masked
from async_rl.inference.checkpoint_weights import weight_files
from async_rl.inference.select import EngineConfig
from async_rl.inference.serving import gpu_bytes, kv_bytes_per_token
from async_rl.trainer.model.model import TrainerConfig
from async_rl.weights.model_info import is_quantized, read_config, read_model_info
from async_rl.weights.quantized import plain_sizes

GIB = 1 << 30
MOST_LR = 5e-5  # for all weights of a trained model; 1e-6 is usual
LEAST_TOKENS = 512  # of a rollout of a language model, prompt included


def summary(config: RunConfig) -> str:
    """Lines of text about a checked run."""
    return "".join(f"{name:10}{text}\n" for name, text in _lines(config))


def _lines(config: RunConfig) -> Iterator[tuple[str, str]]:
    trainer, engine, rollout, checkpoint = config.trainer, config.engine, config.rollout, config.model.checkpoint
    parallel = trainer.parallel
    yield "run", f"{config.name} in {config.output_dir}, {config.total_train_steps} train steps, seed {config.seed}"
    yield "task", f"{config.task.factory} {masked(config.task.options) or ''}".rstrip()
    yield "model", "built by the task" if checkpoint is None else _model(checkpoint)
    yield (
        "trainer",
        f"{trainer.ranks} ranks = data {trainer.data_parallel} x tensor {parallel.tensor} x pipeline "
        f"{parallel.pipeline} x context {parallel.context}, expert {parallel.expert} x expert_tensor "
        f"{parallel.expert_tensor_size}; {trainer.dtype}, router_replay={trainer.router_replay}, {config.loss.name}",
    )
    yield (
        "engine",
        f"{engine.name}, {engine.replicas} replicas x data {engine.data_parallel} x tensor {engine.tensor_parallel}, "
        f"expert {engine.expert_parallel}; {engine.dtype}, "
        f"max_model_len={engine.max_model_len}",
    )
    for name, teacher in config.teachers.items():
        served = f"{teacher.engine.name}, {teacher.engine.replicas} replicas; {teacher.engine.dtype}"
        yield "teacher", f"{name}: {teacher.checkpoint}, {served}, kl={config.distillation.kl}"
    yield (
        "batch",
        f"{rollout.groups_per_batch} groups x {rollout.trajectories_per_group} trajectories, "
        f"{trainer.updates_per_batch} optimizer steps, max_staleness={config.staleness.max_staleness}",
    )
    if checkpoint is not None:
        for text in _memory(config, checkpoint):
            yield "memory", text


def _model(checkpoint: Path) -> str:
    info, (dense, experts) = read_model_info(checkpoint), parameters_of(checkpoint)
    routed = "" if info.routing is None else f", {info.routing.num_experts} experts, top {info.routing.top_k}"
    return f"{checkpoint}: {info.family}, {dense + experts:,} parameters, {info.num_layers} layers{routed}"


def _memory(config: RunConfig, checkpoint: Path) -> Iterator[str]:
    """Memory of a trainer rank, which also needs activations, and of an engine rank, with the rest that is left."""
    held, served = rank_memory(config, checkpoint), engine_memory(config, checkpoint)
    share = config.cluster.gpus_per_rank
    room = gpu_bytes() * min(1.0, share)
    left = f"; {_gib(room - sum(held.values()))} of {_gib(room)} GiB are left for" if share else ", plus"
    yield f"a trainer rank holds {_sum(held)}{left} activations"
    kv = _kv_bytes(config, checkpoint)
    text = f"an engine rank holds {_sum(served)}"
    if config.gpus_per_replica:
        room = gpu_bytes() * config.engine.gpu_memory_utilization
        text += (
            f", and {_gib(room - sum(served.values()))} of {_gib(room)} GiB (gpu_memory_utilization) are left for K/V"
        )
    yield f"{text}; the K/V of {config.engine.max_num_seqs} requests of full length take {_gib(kv)} GiB"
    if not config.cluster.gpus_per_rank and not config.gpus_per_replica and config.cluster.address is None:
        whole = config.trainer.ranks * sum(held.values())
        whole += config.engine.replicas * config.engine.ranks * sum(served.values())
        yield f"all ranks hold {_gib(whole)} of the {_gib(psutil.virtual_memory().total)} GiB of this machine"


def rank_memory(config: RunConfig, checkpoint: Path) -> dict[str, float]:
    """Name -> bytes of what a trainer rank holds all the time on its device; without activations."""
    dense, experts = parameters_of(checkpoint)
    trainer, layers = config.trainer, read_model_info(checkpoint).num_layers
    parts = rank_parts(trainer, cpu_offload=config.optimizer.cpu_offload, dense=dense, experts=experts, layers=layers)
    critic = _critic_memory(config, checkpoint)
    if trainer.lora.rank:
        return {"frozen weights, plus adapters": parts["weights"], **critic}
    copies = {
        "a copy for the probe (mismatch)": config.mismatch.prompts > 0,
        "a copy for the KL term (loss.kl_coefficient)": config.loss.kl_coefficient > 0,
    }
    return parts | {name: parts["weights"] for name, is_held in copies.items() if is_held} | critic


def _critic_memory(config: RunConfig, checkpoint: Path) -> dict[str, float]:
    """What an own trunk of the critic adds to `rank_memory`; it has no output layer, which counts here."""
    if not config.has_critic or config.critic.trunk == "shared":
        return {}
    of = config.critic.checkpoint or checkpoint
    dense, experts = parameters_of(of)
    layers = read_model_info(of).num_layers
    parts = rank_parts(config.trainer, cpu_offload=0.0, dense=dense, experts=experts, layers=layers)
    return {"the critic": sum(parts.values())}


def engine_memory(config: RunConfig, checkpoint: Path) -> dict[str, float]:
    """Name -> bytes of what an engine rank holds, without K/V."""
    engine, (dense, experts) = config.engine, parameters_of(checkpoint)
    weights = (dense / engine.tensor_parallel + experts / engine.ranks) * (4 if engine.dtype == "float32" else 2)
    return {"weights": weights, **({"their twin (sync.mode=staged)": weights} if config.sync.mode == "staged" else {})}


def with_room_for_twin(config: RunConfig, checkpoint: Path) -> EngineConfig:
    """The engine's settings, with the room of the second copy of the weights that `sync.mode=staged` loads into."""
    if config.sync.mode != "staged":
        return config.engine
    return replace(config.engine, twin_bytes=math.ceil(engine_memory(config, checkpoint)["weights"]))


def run_warnings(config: RunConfig, *, num_held_out: int) -> Iterator[str]:
    """Settings that are far from practice; the run starts with them.

    Args:
        num_held_out: held-out prompts.
    """
    if not num_held_out:
        yield (
            "no prompt is held out, so nothing is validated; give Task(validation=...)"
            if config.validation.prompts
            else "validation.prompts is 0, so nothing is validated"
        )
    checkpoint, optimizer, limits = config.model.checkpoint, config.optimizer, config.rollout.limits
    if checkpoint is None:
        return
    if optimizer.lr > MOST_LR and not config.trainer.lora.rank:
        yield f"optimizer.lr is {optimizer.lr:g} for all weights of a trained model; 1e-6 is usual"
    for name in ("max_tokens", "max_new_tokens_per_turn"):
        if (most := getattr(limits, name)) is not None and most < LEAST_TOKENS:
            yield f"rollout.limits.{name} is {most}: longer replies are cut and scored as they are"
    if config.gpus_per_replica and config.engine.enforce_eager:
        yield "engine.enforce_eager is true: decoding has no CUDA graphs"
    share = config.cluster.gpus_per_rank
    if share and sum(rank_memory(config, checkpoint).values()) > gpu_bytes() * min(1.0, share):
        yield "a trainer rank does not fit into the memory of a GPU: use more ranks, or optimizer.cpu_offload=1.0"
    if config.gpus_per_replica:
        room = gpu_bytes() * config.engine.gpu_memory_utilization - sum(engine_memory(config, checkpoint).values())
        if room < _kv_bytes(config, checkpoint) / config.engine.max_num_seqs:
            yield "an engine rank has no room for the K/V of one request: raise engine.tensor_parallel"


def _kv_bytes(config: RunConfig, checkpoint: Path) -> float:
    """Bytes of the K/V of `max_num_seqs` requests of full length, on one engine rank."""
    engine, fields = config.engine, read_config(checkpoint)
    each = engine.max_model_len * kv_bytes_per_token(fields, engine)
    return engine.max_num_seqs * each / engine.tensor_parallel


def _gib(size: float) -> str:
    return f"{size / GIB:.3g}"


def _sum(parts: Mapping[str, float]) -> str:
    shown = " + ".join(f"{_gib(size)} of {name}" for name, size in parts.items())
    return f"{_gib(sum(parts.values()))} GiB = {shown}"


def rank_parts(
    trainer: TrainerConfig, *, cpu_offload: float, dense: int, experts: int, layers: int
) -> dict[str, float]:
    """Bytes of weights, of gradients and of optimizer state of a trainer rank, on its GPU.

    The rank has an even share of the model if the pipeline stages have the same number of layers. Otherwise the rank
    with most layers is meant: 3 layers on 2 stages are 2/3 of the model.

    A bfloat16 weight has 2 bytes, its gradient 4, and AdamW's float32 copy and moments 12; of float32 weights 4, 4 and
    8. The distributed optimizer splits the state over the ranks that hold the same weights: those of dense weights over
    `data_parallel` x context ranks, those of an expert over ranks / (pipeline x expert x expert_tensor). With
    LoRA, only the weights are counted.

    Args:
        cpu_offload: share of the optimizer state that is in CPU memory.
        dense: weights outside of experts, of the whole model.
        experts: weights in experts.
        layers: number of layers of the model.
    """
    parallel = trainer.parallel
    width, state = (2, 12) if trainer.dtype == "bfloat16" else (4, 8)
    stage = parallel.most_layers_per_rank(layers) / layers
    held, gradients, states = 0.0, 0.0, 0.0
    for weights, split in ((dense, parallel.tensor), (experts, parallel.expert * parallel.expert_tensor_size)):
        holders = trainer.ranks // (split * parallel.pipeline) if trainer.distributed_optimizer else 1
        share = weights * stage / split
        held += share * width
        if not trainer.lora.rank:
            gradients += share * 4
            states += share * state * (1 - cpu_offload) / holders
    return {"weights": held, "gradients": gradients, "optimizer state": states}


def parameters_of(checkpoint: Path) -> tuple[int, int]:
    """Numbers of weights outside of experts, and in experts, from the headers of the files."""
    sizes = list(plain_sizes(checkpoint) if is_quantized(checkpoint) else _sizes(checkpoint))
    experts = sum(size for name, size in sizes if ".experts." in name)
    return sum(size for _, size in sizes) - experts, experts


def _sizes(checkpoint: Path) -> Iterator[tuple[str, int]]:
    """(name, number of values) of each tensor."""
    for path in weight_files(checkpoint):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, math.prod(file.get_slice(name).get_shape())
