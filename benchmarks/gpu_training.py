"""TrainerRank.train in bfloat16 on one GPU, with layers of the size of Qwen3-30B-A3B's (random weights, fewer layers).

Ways: a bare megatron loop (forward, cross entropy, backward, update, on micro-batches built before the clock starts),
the trainer with the live routers, with R3, with R3 and experts one after another, with R3 and padded micro-batches,
with R3 and full recomputation. The rows that R3 replays are drawn at random, so that experts get the same work as from
untrained routers. The sequences have log-normal lengths, or `--fixed` tokens each.

The share of the peak counts the floating-point operations of `async_rl.trainer.model.flops`. Export writes the weights
as a version into memory (/dev/shm), checksums included; the copy next to it is of the same bytes from GPU to host.

    python benchmarks/gpu_training.py [--layers 3] [--tokens 32768] [--longest 8192] [--micro-batch-tokens 8192]
        [--rounds 3] [--peak 989e12]
    python benchmarks/gpu_training.py --fixed 16384 --micro-batch-tokens 16384
    python benchmarks/gpu_training.py --fixed 65536 --tokens 65536 --micro-batch-tokens 65536

With `--device cpu` the layers are small, and the figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.families import read_shape
from async_rl.trainer.model.flops import peak_of, train_operations
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.rank import TrainerRank
from async_rl.trainer.state.optimizer import OptimizerConfig
from benchmarks.support import markdown_table, say, show, trainers_side_by_side
from benchmarks.trainer import bare_step, build_micro_batches, random_batch
from tests.helpers.loop_experts import loop_experts

ADAM = OptimizerConfig(lr=1e-6)
LOOP = "trainer, R3, experts in a loop"
SIZES = {  # vocabulary, hidden, heads, key-value heads, channels of a head, experts, top k, expert
    "cuda": (151936, 2048, 32, 4, 128, 128, 8, 768),
    "cpu": (512, 64, 4, 2, 16, 8, 2, 32),
}
MEDIAN, SIGMA = 1000, 1.0


def save_slice(folder: Path, *, layers: int, device: str, positions: int) -> Path:
    """A checkpoint in bfloat16 of `layers` layers as Qwen3-30B-A3B has them; of small ones for the CPU."""
    vocab, hidden, heads, kv_heads, head, experts, top_k, expert = SIZES[device]
    config = transformers.Qwen3MoeConfig(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head, num_experts=experts, num_experts_per_tok=top_k,  # pyright: ignore[reportCallIssue]
        moe_intermediate_size=expert, intermediate_size=3 * hidden, norm_topk_prob=True, tie_word_embeddings=False,
        max_position_embeddings=positions, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "slice")
    return folder / "slice"


def draw_batch(checkpoint: Path, *, tokens: int, longest: int, fixed: int | None) -> TrainingBatch:
    """Random sequences of `fixed` tokens or of log-normal lengths, `tokens` in all but for the last one."""
    rng, lengths = np.random.default_rng(0), list[int]()
    while sum(lengths) < tokens:
        lengths.append(fixed or int(np.clip(rng.lognormal(np.log(MEDIAN), SIGMA), 2, longest)))
    return random_batch(checkpoint, lengths)


@dataclass(frozen=True, slots=True)
class Figure:
    """Cost of a step."""

    seconds: list[float]
    """Seconds of each round."""
    memory: int
    """Most bytes that were allocated in them."""


def measure(step: Callable[[], object], *, rounds: int) -> Figure:
    """After one step that warms up."""
    on_gpu = torch.cuda.is_available()
    step()
    synchronize()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return Figure(seconds, torch.cuda.max_memory_allocated() if on_gpu else 0)


def synchronize() -> None:
    """Wait for the kernels of a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def with_trainer(config: TrainerConfig, checkpoint: Path, use: Callable[[TrainerRank], Any]) -> Any:
    """What `use` gives of a trainer; the GPU is empty before and after."""
    with trainers_side_by_side({"one": (config, DecoupledPPO())}, checkpoint=checkpoint, optimizer=ADAM) as trainers:
        found = use(trainers["one"])
        del trainers["one"]
    empty_gpu()
    return found


def empty_gpu() -> None:
    """Give the memory of deleted tensors back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def bare(trainer: TrainerRank, batch: TrainingBatch, config: TrainerConfig, *, rounds: int) -> Figure:
    """The loop without the trainer's work."""
    micro_batches = build_micro_batches(trainer, batch, config)
    optimizer = trainer._optimizer  # pyright: ignore[reportPrivateUsage]  # a second one has no room
    figure = measure(lambda: bare_step(trainer, optimizer, micro_batches), rounds=rounds)
    trainer.model.release_graph()
    return figure


def export_seconds(trainer: TrainerRank) -> tuple[float, float, int]:
    """Seconds of an export, of a copy of as many bytes from GPU to host, and the bytes; medians of three."""
    exports, copies, size = list[float](), list[float](), 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for version in range(1, 4):
            start = time.perf_counter()
            update = trainer.export(Path(folder), version=version, keep_version=version)
            exports.append(time.perf_counter() - start)
            assert update is not None
            size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    to = torch.empty(held.shape, dtype=torch.uint8)
    for _ in range(3):
        start = time.perf_counter()
        to.copy_(held)
        copies.append((time.perf_counter() - start) * size / len(held))
    return statistics.median(exports), statistics.median(copies), size


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all ways, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fixed", type=int, help="tokens of each sequence")
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda")
    parser.add_argument("--peak", type=float, help="operations/s of the GPU in dense bfloat16, if they are not known")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)

    def config(**changes: Any) -> TrainerConfig:
        return TrainerConfig(dtype="bfloat16", micro_batch_tokens=arguments.micro_batch_tokens, **changes)

    ways = {
        "trainer, no replay": config(router_replay="none"),
        "trainer, R3": config(),
        LOOP: config(),
        "trainer, R3, padded": config(packing=False),
        "trainer, R3, full recomputation": config(recompute="full"),
    }
    with tempfile.TemporaryDirectory() as folder:
        fixed, device = arguments.fixed, arguments.device
        longest = fixed or arguments.longest
        checkpoint = save_slice(Path(folder), layers=arguments.layers, device=device, positions=longest)
        empty_gpu()
        batch = draw_batch(checkpoint, tokens=arguments.tokens, longest=longest, fixed=fixed)
        lengths: list[int] = batch.lengths.tolist()
        gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        tokens, peak = sum(lengths), arguments.peak or peak_of(gpu) or math.nan
        work = train_operations(
            read_shape(checkpoint),
            np.stack([np.zeros_like(batch.lengths), batch.lengths], axis=1),
            num_loss_tokens=int(batch.num_loss_tokens.sum()),
            lora=ways["trainer, R3"].lora,
        )
        show(f"{gpu}, torch {torch.__version__}, {arguments.layers} layers")
        show(
            f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {tokens} in all; "
            f"medians of {arguments.rounds}\n"
        )
        figures: dict[str, Figure] = {
            "bare megatron loop": with_trainer(
                ways["trainer, no replay"],
                checkpoint,
                lambda t: bare(t, batch, ways["trainer, no replay"], rounds=arguments.rounds),
            )
        }
        for name, settings in ways.items():
            with loop_experts() if name == LOOP else contextlib.nullcontext():
                figures[name] = with_trainer(
                    settings, checkpoint, lambda t: measure(lambda: t.train(batch), rounds=arguments.rounds)
                )
            say(f"{name}: {tokens / statistics.median(figures[name].seconds):.0f} tokens/s")
        export, copy, size = with_trainer(ways["trainer, R3"], checkpoint, export_seconds)
    base = statistics.median(figures["bare megatron loop"].seconds)
    rows = [
        (
            name,
            f"{tokens / statistics.median(figure.seconds):.0f}",
            f"{base / statistics.median(figure.seconds):.3f}",
            f"{work / statistics.median(figure.seconds) / peak:.1%}",
            f"{figure.memory / 2**30:.1f} GiB",
            ", ".join(f"{s:.2f}" for s in figure.seconds),
        )
        for name, figure in figures.items()
    ]
    show(markdown_table(("way", "tokens/s", "over the bare loop", "of the peak", "memory", "seconds"), rows))
    show(f"\nexport of {size / 1e9:.2f} GB: {export:.2f} s; copying it from GPU to host: {copy:.2f} s")


if __name__ == "__main__":
    main()
