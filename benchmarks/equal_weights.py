"""What router replay does to the gap between engine and trainer at equal weights, in the precision of real training.

vLLM samples in bfloat16, then the trainer computes the logprobs of the same tokens with the very same weights:

- none: its live router chooses the experts, in the pass for the old logprobs and in the update alike,
- R2: it replays the experts that the pass for the old logprobs chose,
- R3: it replays the experts that the engine chose.

d = trainer - engine logprob of a sampled token, k3 = mean(exp(d) - 1 - d), F(2) = share of tokens with
|d| > log 2. Brackets are 95 % bootstrap intervals over trajectories. `calculator` is the warm-started model on its own
task; the other models have random weights and random prompts.

    python benchmarks/equal_weights.py [--models calculator qwen3_moe deepseek_v3 70m] [--trajectories N]
        [--dtype bfloat16|float32]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_loop.engine import Engine, GenerateRequest
from agent_loop.tools.tool import PauseGate
from async_rl.config import RunConfig, load_config
from async_rl.inference.vllm.engine import engine_environment, start_vllm
from async_rl.rollout.rollouter import Rollouter
from async_rl.rollout.task import Task, build_task
from async_rl.trainer.batch.advantage import batch_rewards
from async_rl.trainer.batch.micro_batch import Coordinates
from async_rl.trainer.batch.training_batch import TrainingBatch, training_batch
from async_rl.weights.model_info import read_model_info
from benchmarks.support import (
    BoolArray,
    FloatArray,
    Interval,
    Mismatch,
    bootstrap,
    markdown_table,
    roll_groups,
    say,
    show,
    start_rank,
    warm_start,
    with_sequences,
)
from message_queue.heads import head_of
from message_queue.tokens import RoutingSpec, StopReason
from message_queue.training_sequence import TrainingSequence, content_of
from message_queue.trajectory import PromptGroup, Trajectory

PROMPT, SAMPLED = 32, 96  # tokens of a trajectory under random weights
VOCAB = 1024
MODES = ("none", "R2", "R3")
LOG_2 = float(np.log(2.0))
MODELS = ("calculator", "qwen3_moe", "deepseek_v3", "70m")
Rows = NDArray[np.int16]


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """One model under every mode."""

    parameters: int
    """Number of its parameters."""
    mismatch: dict[str, Mismatch]
    """Mode -> trainer against engine."""
    agreement: dict[str, Interval]
    """Mode -> share of (token, MoE layer) that use the engine's experts."""


def random_model(name: str) -> Any:
    """A configuration: two of about a million parameters and one of about 70 million."""
    common = {"vocab_size": VOCAB, "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 0}
    attention = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    if name == "70m":
        return transformers.Qwen3MoeConfig(
            **common, **attention, hidden_size=512, num_hidden_layers=6, intermediate_size=1024,
            moe_intermediate_size=256, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
            decoder_sparse_step=1, mlp_only_layers=[0],
        )  # fmt: skip
    small = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256, "moe_intermediate_size": 64}
    if name == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **common, **small, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=16,  # pyright: ignore[reportCallIssue]
            num_experts_per_tok=4, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[0],
        )  # fmt: skip
    return transformers.DeepseekV3Config(
        **common, **small, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=16, n_shared_experts=1,
        num_experts_per_tok=4, n_group=4, topk_group=2, first_k_dense_replace=1, routed_scaling_factor=2.5,
        norm_topk_prob=True, q_lora_rank=64, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128,
    )  # fmt: skip


def save_random(name: str, folder: Path) -> Path:
    """Weights that keep the scale of activations; router and head logits have a standard deviation of about 2."""
    config = random_model(name)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                gain = 2.0 if path.endswith(("gate.weight", "lm_head.weight")) else 1.0
                parameter.normal_(0, gain / math.sqrt(parameter.shape[-1]))
            if path.endswith("embed_tokens.weight"):
                parameter.normal_(0, 1.0)
    model.save_pretrained(folder / name)
    if name == "deepseek_v3":  # transformers 5 drops two fields that vLLM reads
        path = folder / name / "config.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "topk_method": "noaux_tc", "scoring_func": "sigmoid"})
        )
    return folder / name


async def sample(engine: Engine, routing: RoutingSpec, *, trajectories: int) -> list[PromptGroup]:
    """Groups of one trajectory, each of random prompt tokens and SAMPLED tokens of the engine."""
    rng = np.random.default_rng(0)

    async def one(place: int) -> PromptGroup:
        prompt = rng.integers(3, VOCAB, PROMPT).astype(np.int32)
        trajectory = Trajectory(routing=routing)
        trajectory.observe(prompt)
        request = GenerateRequest(request_id=f"sample-{place:05d}", token_ids=prompt, max_new_tokens=SAMPLED)
        for segment in await engine.generate(request):
            trajectory.extend(segment)
        trajectory.close(stop_reason=StopReason.LENGTH, reward=float(place % 2))
        return PromptGroup(group=place, prompt=place, admitted_version=0, admitted_update=0, trajectories=[trajectory])

    return list(await asyncio.gather(*(one(place) for place in range(trajectories))))


async def roll_out(config: RunConfig, *, task: Task | None, checkpoint: Path, trajectories: int) -> list[PromptGroup]:
    """Groups of one trajectory: of held-out prompts of the task, or of random tokens."""
    rollout, routing = config.rollout, read_model_info(checkpoint).routing
    assert routing is not None
    replica = await start_vllm(config.engine, name="replica-0", checkpoint=checkpoint)
    try:
        if task is None:
            return await sample(replica, routing, trajectories=trajectories)
        loop = task.build_loop(
            engine=replica,
            tokenizer=transformers.AutoTokenizer.from_pretrained(checkpoint),
            sampling=rollout.sampling,
            limits=rollout.limits,
            gate=PauseGate(),
        )
        rollouter = Rollouter(loop=loop, routing=routing, trajectories_per_group=1)
        prompts = task.validation_prompts(trajectories)
        return await roll_groups(rollouter, prompts, first_group=0, at_once=trajectories)
    finally:
        await replica.close()


def batch_of(groups: Sequence[PromptGroup], config: RunConfig, *, update: int = 0) -> TrainingBatch:
    """The batch that a run would make of `groups`, which version 0 sampled."""
    heads = [head_of(group) for group in groups]
    return training_batch(
        heads,
        [content_of(group) for group in groups],
        advantages=batch_rewards(heads, config.advantage).advantages(),
        current_update=update,
        version_updates={0: 0},
    )


def evaluate(
    rank: Any, batch: TrainingBatch, *, replay: Literal["none", "R2", "R3"]
) -> tuple[list[torch.Tensor], list[Rows]]:
    """Logprobs float32 [n] of the tokens in the loss and experts int16 [t, L, K], of each sequence.

    The mode is chosen here and not by the rank's own configuration, so that one set of weights serves all modes.
    experts: those replayed (R3), those that the live router chose (R2), -1 (none).
    """
    from async_rl.trainer.step import MicroBatchBuilder, Objective

    info, model = rank._info, rank.model
    plan = rank._planner.whole(batch)
    (update,) = plan.updates
    builder = MicroBatchBuilder(
        plan.batch,
        update,
        at=Coordinates(),
        device=next(model.chunks[0].parameters()).device,
        packing=True,
        shares_prefixes=False,
        replay=replay,
        routing=info.routing,
        layers=model.replay.layers,
        rotary=model.rotary,
    )
    objective: Objective = rank._forward_backward.objective("logprobs")
    logprobs = torch.zeros(update.num_loss_tokens)
    experts = [np.full((length, *info.routing.row_shape), -1, np.int16) for length in batch.lengths.tolist()]
    with torch.no_grad():
        for numbers in update.micro_batches[0]:
            micro_batch = builder.build(numbers)
            hidden = micro_batch.forward(model.wrapped[0], at=Coordinates())
            logprobs[micro_batch.numbers.cpu()] = objective(hidden, micro_batch)[1]["logprobs"].cpu()
            routing, rows = micro_batch.context.routing, micro_batch.context.rows
            of_each = rows.token_row.split(batch.lengths[numbers].tolist())
            for place, layer in enumerate(info.routing.layers if routing is not None else ()):
                for number, of in zip(numbers, of_each, strict=True):
                    experts[number][:, place] = routing.tables[layer][of].cpu().numpy()
    return list(logprobs.split(batch.num_loss_tokens.tolist())), experts


def changed_rows(engine: Rows, live: Rows) -> BoolArray:
    """bool [t, L]: the live router chose another set of experts; False where the engine has no row.

    Args:
        engine, live: int16 [t, L, K].
    """
    return (np.sort(engine) != np.sort(live)).any(-1) & (engine >= 0).all(-1)


def against_engine(batch: TrainingBatch, logprobs: Sequence[torch.Tensor]) -> Mismatch:
    """d of every token in the loss, by sequence."""
    behaviour = np.concatenate([batch.loss_tokens(number).logprobs for number in range(len(batch))])
    d = torch.cat(list(logprobs)).numpy().astype(np.float64) - behaviour
    return Mismatch(d, np.repeat(np.arange(len(batch)), batch.num_loss_tokens), len(batch))


def choices_of(engine: Sequence[Rows], changed: Sequence[BoolArray]) -> tuple[Mismatch, FloatArray]:
    """Every choice of the engine by its sequence, and 1 where it is changed."""
    routed = [(rows >= 0).all(-1) for rows in engine]
    where = np.concatenate([c[r] for c, r in zip(changed, routed, strict=True)]).astype(np.float64)
    sequences = np.repeat(np.arange(len(engine)), [int(r.sum()) for r in routed])
    return Mismatch(np.zeros(len(where)), sequences, len(engine)), where


def compare(rank: Any, batch: TrainingBatch) -> Found:
    """All modes on one batch under the rank's weights."""
    live, chosen = evaluate(rank, batch, replay="R2")

    def rows_of_r2(sequence: TrainingSequence, number: int) -> TrainingSequence:
        assert sequence.rows is not None
        return replace(sequence, rows=chosen[number][: len(sequence.rows)].astype(sequence.rows.dtype))

    replayed, engine = evaluate(rank, batch, replay="R3")
    # If the engine has no row, R2 has none either.
    again, _ = evaluate(rank, with_sequences(batch, rows_of_r2), replay="R3")
    choices, changed = choices_of(engine, [changed_rows(*rows) for rows in zip(engine, chosen, strict=True)])
    logprobs = {"none": live, "R2": again, "R3": replayed}
    return Found(
        parameters=sum(parameter.numel() for chunk in rank.model.chunks for parameter in chunk.parameters()),
        mismatch={mode: against_engine(batch, logprobs[mode]) for mode in MODES},
        agreement={mode: choices.mean(np.ones_like(changed) if mode == "R3" else 1.0 - changed) for mode in MODES},
    )


def over_r3(found: Found, mode: str) -> Interval:
    """k3 of `mode` over k3 of R3, on the same resampled trajectories."""
    other, replayed = (
        np.bincount(m.trajectory, weights=m.k3, minlength=m.trajectories)
        for m in (found.mismatch[mode], found.mismatch["R3"])
    )

    def statistic(drawn: FloatArray) -> FloatArray:
        return (drawn @ other) / np.maximum(drawn @ replayed, np.finfo(np.float64).tiny)

    return bootstrap(statistic, units=found.mismatch[mode].trajectories)


def table(found: dict[str, Found]) -> str:
    """A row per model and mode."""
    header = ("model", "replay", "k3", "F(2)", "max abs d", "experts as the engine's", "k3 over R3")
    rows: list[Sequence[str]] = []
    for name, model in found.items():
        for mode in MODES:
            m = model.mismatch[mode]
            rows.append(
                (
                    f"{name}, {model.parameters / 1e6:.1f}M",
                    mode,
                    f"{m.mean(m.k3):.2e}",
                    f"{m.mean((np.abs(m.d) > LOG_2).astype(np.float64)):.2%}",
                    f"{np.abs(m.d).max():.2e}",
                    f"{model.agreement[mode]:.2%}",
                    f"{over_r3(model, mode):.2f}",
                )
            )
    return markdown_table(header, rows)


def measure(name: str, config: RunConfig, *, trajectories: int, folder: Path) -> Found:
    """Roll out, then evaluate."""
    task = build_task(config.task, seed=config.seed) if name == "calculator" else None
    checkpoint = warm_start(config, task=task, folder=folder) if task else save_random(name, folder)
    groups = asyncio.run(roll_out(config, task=task, checkpoint=checkpoint, trajectories=trajectories))
    rank = start_rank(config.trainer, config.loss, checkpoint=checkpoint, optimizer=config.optimizer)
    found = compare(rank, batch_of(groups, config))
    rank.close()
    say(f"{name}: {len(found.mismatch['R3'].d)} sampled tokens")
    del rank
    gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--trajectories", type=int, default=128, help="of each model, at least 2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of engine and trainer")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    config = load_config([f"engine.dtype={args.dtype}", f"trainer.dtype={args.dtype}", "warm_start.steps=120"])
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(engine_environment(config.engine))
    with tempfile.TemporaryDirectory(prefix="async_rl-") as folder:
        found = {
            name: measure(name, config, trajectories=args.trajectories, folder=Path(folder)) for name in args.models
        }
    show(f"{args.dtype}, {args.trajectories} trajectories of each model\n")
    show(table(found))


if __name__ == "__main__":
    main()
