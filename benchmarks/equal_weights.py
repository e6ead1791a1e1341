"""What router replay does to the gap between engine and trainer at equal weights, in the precision of real training.

vLLM samples in bfloat16, then the trainer computes the logprobs of the same tokens with the very same weights:

- none: its live router chooses the experts, in the pass for the old logprobs and in the update alike,
- R2: it replays the experts that the pass for the old logprobs chose,
- R3: it replays the experts that the engine chose.

d = trainer - engine logprob of a sampled token, k1 = mean(-d), k3 = mean(exp(d) - 1 - d), F(2) = share of tokens with
|d| > log 2. Brackets are 95 % bootstrap intervals over trajectories. `calculator` is the warm-started model on its own
task; the other models have random weights and random prompts.

    python benchmarks/equal_weights.py [--models calculator qwen3_moe deepseek_v3 70m] [--trajectories N]
        [--dtype bfloat16|float32]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_loop.engine import GenerateRequest
from async_rl.config import RunConfig, load_config
from async_rl.inference.vllm.engine import engine_environment, start_vllm
from async_rl.rollout.task import build_task
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.weights.model_info import read_model_info
from benchmarks.routing_mismatch import LOG_2, against_engine, changed_rows, choices_of, evaluate, roll_out, tensors
from benchmarks.support import (
    FloatArray,
    Interval,
    Mismatch,
    bootstrap,
    figure,
    find_warm_start,
    make_warm_start,
    markdown_table,
    say,
    show,
    start_rank,
)
from benchmarks.train_steps import with_sequences
from message_queue.tokens import StopReason
from message_queue.training_sequence import TrainingSequence
from message_queue.trajectory import PromptGroup, Trajectory

PROMPT, SAMPLED = 32, 96  # tokens of a trajectory under random weights
VOCAB = 1024
MODES = ("none", "R2", "R3")
MODELS = ("calculator", "qwen3_moe", "deepseek_v3", "70m")


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """One model under every mode. agreement: share of (token, MoE layer) that use the engine's experts."""

    parameters: int
    mismatch: dict[str, Mismatch]
    agreement: dict[str, Interval]


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
        import json

        path = folder / name / "config.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "topk_method": "noaux_tc", "scoring_func": "sigmoid"})
        )
    return folder / name


async def sample(config: RunConfig, *, checkpoint: Path, trajectories: int) -> list[PromptGroup]:
    """Groups of one trajectory, each of random prompt tokens and SAMPLED tokens of the engine."""
    routing = read_model_info(checkpoint).routing
    replica = await start_vllm(config.engine, name="replica-0", checkpoint=checkpoint)
    rng = np.random.default_rng(0)

    async def one(place: int) -> PromptGroup:
        prompt = rng.integers(3, VOCAB, PROMPT).astype(np.int32)
        trajectory = Trajectory(routing=routing)
        trajectory.observe(prompt)
        request = GenerateRequest(request_id=f"sample-{place:05d}", token_ids=prompt, max_new_tokens=SAMPLED)
        for segment in await replica.generate(request):
            trajectory.extend(segment)
        trajectory.close(stop_reason=StopReason.LENGTH, reward=float(place % 2))
        return PromptGroup(group=place, prompt=place, admitted_version=0, admitted_update=0, trajectories=[trajectory])

    try:
        return list(await asyncio.gather(*(one(place) for place in range(trajectories))))
    finally:
        await replica.close()


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
    header = ("model", "replay", "k1", "k3", "F(2)", "max abs d", "experts as the engine's", "k3 over R3")
    rows: list[Sequence[str]] = []
    for name, model in found.items():
        for mode in MODES:
            m, quotient = model.mismatch[mode], over_r3(model, mode)
            rows.append(
                (
                    f"{name}, {model.parameters / 1e6:.1f}M",
                    mode,
                    figure(m.mean(-m.d)),
                    figure(m.mean(m.k3)),
                    figure(m.mean((np.abs(m.d) > LOG_2).astype(np.float64)), percent=True),
                    f"{np.abs(m.d).max():.2e}",
                    figure(model.agreement[mode], percent=True),
                    f"{quotient.value:.2f} [{quotient.low:.2f}, {quotient.high:.2f}]",
                )
            )
    return markdown_table(header, rows)


def measure(name: str, config: RunConfig, *, trajectories: int, folder: Path) -> Found:
    """Roll out, then evaluate."""
    if name == "calculator":
        task = build_task(config.task, seed=config.seed)
        checkpoint = find_warm_start(config.warm_start.cache)
        if checkpoint is None:
            float32 = replace(config, trainer=replace(config.trainer, dtype="float32"))
            checkpoint = make_warm_start(float32, task=task, folder=folder)
        groups, _ = asyncio.run(
            roll_out(config, task=task, checkpoint=checkpoint, trajectories=trajectories, batches=0)
        )
    else:
        checkpoint = save_random(name, folder)
        groups = asyncio.run(sample(config, checkpoint=checkpoint, trajectories=trajectories))
    rank = start_rank(config, checkpoint=checkpoint, optimizer=config.optimizer)
    found = compare(rank, tensors(groups, config=config, current_update=0))
    rank.close()
    say(f"{name}: {len(found.mismatch['R3'].d)} sampled tokens")
    del rank
    gc.collect()
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--trajectories", type=int, default=128, help="of each model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of engine and trainer")
    args = parser.parse_args(arguments)
    if args.trajectories < 2:
        parser.error(f"--trajectories is {args.trajectories}; intervals need at least 2")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(sys.argv[1:] if arguments is None else arguments)
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
