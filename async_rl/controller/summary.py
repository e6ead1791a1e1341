"""Short description of a run before it starts: model, layout, batches and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from async_rl.config import RunConfig
from async_rl.inference.checkpoint_weights import weight_files
from async_rl.inference.serving import kv_bytes_per_token
from async_rl.weights.model_info import read_model_info

GIB = 1 << 30


def summary(config: RunConfig) -> str:
    """Lines of text about a checked run."""
    return "".join(f"{name:10}{text}\n" for name, text in _lines(config))


def _lines(config: RunConfig) -> Iterator[tuple[str, str]]:
    trainer, engine, rollout, checkpoint = config.trainer, config.engine, config.rollout, config.model.checkpoint
    parallel = trainer.parallel
    yield "run", f"{config.name} in {config.output_dir}, {config.total_train_steps} train steps, seed {config.seed}"
    yield "task", f"{config.task.factory} {dict(config.task.options) or ''}".rstrip()
    yield "model", "built by the task" if checkpoint is None else _model(checkpoint)
    yield (
        "trainer",
        f"{trainer.ranks} ranks = data {trainer.data_parallel} x tensor {parallel.tensor} x pipeline "
        f"{parallel.pipeline} x context {parallel.context}, expert {parallel.expert} x expert_tensor "
        f"{parallel.expert_tensor_size}; {trainer.dtype}, router_replay={trainer.router_replay}, {config.loss.name}",
    )
    yield (
        "engine",
        f"{engine.name}, {engine.replicas} replicas x tensor {engine.tensor_parallel}, {engine.dtype}, "
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
    info, (dense, experts) = read_model_info(checkpoint), _parameters(checkpoint)
    routed = "" if info.routing is None else f", {info.routing.num_experts} experts, top {info.routing.top_k}"
    return f"{checkpoint}: {info.family}, {dense + experts:,} parameters, {info.num_layers} layers{routed}"


def _memory(config: RunConfig, checkpoint: Path) -> str:
    """Bytes of weights, gradients and optimizer state of a rank, and of weights and K/V of an engine.

    A rank with bfloat16 weights has 2 bytes per weight, 4 for its gradient, and 12 for AdamW's float32 copy and
    moments; with float32 weights 4, 4 and 8. With LoRA, the weights alone count. Activations are not counted.
    """
    trainer, engine, (dense, experts) = config.trainer, config.engine, _parameters(checkpoint)
    parallel = trainer.parallel
    weights = (
        dense / (parallel.tensor * parallel.pipeline)
        + experts / (parallel.expert * parallel.expert_tensor_size * parallel.pipeline)
    )  # fmt: skip
    width, state = (2, 12) if trainer.dtype == "bfloat16" else (4, 8)
    held, kind = weights * width, "frozen weights, plus adapters and activations"
    if not trainer.lora.rank:
        held += weights * (4 + state / (trainer.data_parallel if trainer.distributed_optimizer else 1))
        kind = "weights, gradients and optimizer state, plus activations"
    fields: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    served = (dense + experts) * (4 if engine.dtype == "float32" else 2) / engine.tensor_parallel
    kv = engine.max_num_seqs * engine.max_model_len * kv_bytes_per_token(fields, dtype=engine.dtype)
    return (
        f"a trainer rank holds {held / GIB:.3g} GiB of {kind}; an "
        f"engine rank holds {served / GIB:.3g} GiB of weights, and the K/V of {engine.max_num_seqs} requests of full "
        f"length take {kv / engine.tensor_parallel / GIB:.3g} GiB"
    )


def _parameters(checkpoint: Path) -> tuple[int, int]:
    """Numbers of weights outside of experts, and in experts, from the headers of the files."""
    dense, experts = 0, 0
    for path in weight_files(checkpoint):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                size = 1
                for length in file.get_slice(name).get_shape():
                    size *= length
                if ".experts." in name:
                    experts += size
                else:
                    dense += size
    return dense, experts
