"""Short description of a run before it starts: model, layout, batches and memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from async_rl.config import RunConfig
from async_rl.files.masking import masked
from async_rl.inference.checkpoint_weights import weight_files
from async_rl.inference.serving import kv_bytes_per_token
from async_rl.trainer.model.model import TrainerConfig
from async_rl.weights.model_info import is_quantized, read_model_info
from async_rl.weights.quantized import plain_sizes

GIB = 1 << 30


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
    yield (
        "batch",
        f"{rollout.groups_per_batch} groups x {rollout.trajectories_per_group} trajectories, "
        f"{trainer.updates_per_batch} optimizer steps, max_staleness={config.staleness.max_staleness}",
    )
    if checkpoint is not None:
        yield "memory", _memory(config, checkpoint)


def _model(checkpoint: Path) -> str:
    info, (dense, experts) = read_model_info(checkpoint), parameters_of(checkpoint)
    routed = "" if info.routing is None else f", {info.routing.num_experts} experts, top {info.routing.top_k}"
    return f"{checkpoint}: {info.family}, {dense + experts:,} parameters, {info.num_layers} layers{routed}"


def _memory(config: RunConfig, checkpoint: Path) -> str:
    """Bytes of weights, gradients and optimizer state of a rank, and of weights and K/V of an engine.

    Activations are not counted.
    """
    engine, (dense, experts) = config.engine, parameters_of(checkpoint)
    held = rank_bytes(
        config.trainer,
        cpu_offload=config.optimizer.cpu_offload,
        dense=dense,
        experts=experts,
        layers=read_model_info(checkpoint).num_layers,
    )
    frozen = config.trainer.lora.rank > 0
    kind = "frozen weights, plus adapters and" if frozen else "weights, gradients and optimizer state, plus"
    fields: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    served = (dense / engine.tensor_parallel + experts / engine.ranks) * (4 if engine.dtype == "float32" else 2)
    kv = engine.max_num_seqs * engine.max_model_len * kv_bytes_per_token(fields, dtype=engine.dtype)
    return (
        f"a trainer rank holds {held / GIB:.3g} GiB of {kind} activations; an "
        f"engine rank holds {served / GIB:.3g} GiB of weights, and the K/V of {engine.max_num_seqs} requests of full "
        f"length take {kv / engine.tensor_parallel / GIB:.3g} GiB"
    )


def rank_bytes(trainer: TrainerConfig, *, cpu_offload: float, dense: int, experts: int, layers: int) -> float:
    """Bytes of weights, gradients and optimizer state of a trainer rank, on its GPU.

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
        layers: of the model.
    """
    parallel = trainer.parallel
    width, state = (2, 12) if trainer.dtype == "bfloat16" else (4, 8)
    stage = parallel.most_layers_per_rank(layers) / layers
    total = 0.0
    for weights, split in (
        (dense, parallel.tensor),
        (experts, parallel.expert * parallel.expert_tensor_size),
    ):
        holders = trainer.ranks // (split * parallel.pipeline) if trainer.distributed_optimizer else 1
        trained = 0.0 if trainer.lora.rank else 4 + state * (1 - cpu_offload) / holders
        total += weights * stage / split * (width + trained)
    return total


def parameters_of(checkpoint: Path) -> tuple[int, int]:
    """Numbers of weights outside of experts, and in experts, from the headers of the files."""
    dense, experts = 0, 0
    for name, size in plain_sizes(checkpoint) if is_quantized(checkpoint) else _sizes(checkpoint):
        if ".experts." in name:
            experts += size
        else:
            dense += size
    return dense, experts


def _sizes(checkpoint: Path) -> Iterator[tuple[str, int]]:
    """(name, number of values) of each tensor."""
    for path in weight_files(checkpoint):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, math.prod(file.get_slice(name).get_shape())
