"""Whole runs on one GPU that trainer and engine share: a model with random weights, and rewards that any model raises.

The runs differ by one thing from `async`: `sync` waits for each batch, `no_rows` replays no routing, `eager` has no
CUDA graphs, `keep` loads weights under requests in flight, `staged` loads next to them, `fp8` keeps K/V in 8 bits,
`folder` publishes files on a disk, `direct` sends to the ranks of the engine. The reward is the share of characters
with even codes in a reply: about 0.5 at first, and every group has a spread. Figures are medians over all steps but the
first two; k3 and the pause are the largest, rows the share of tokens that came with their routing rows, memory the most
that all processes used on the GPU.

    python benchmarks/gpu_runs.py [--runs async sync ...] [--steps 20] [--device cuda|cpu] [--keep DIR] [OVERRIDE ...]

With `--device cpu` the model has 0.2 million weights instead of 1.8 billion, and the figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl import Task
from benchmarks.support import markdown_table, say, show
from recipes.calculator.tokenizer import build_tokenizer

RUNS = {
    "async": (),
    "sync": ("staleness.max_staleness=0",),
    "no_rows": ("trainer.router_replay=none",),
    "eager": ("engine.enforce_eager=true",),
    "keep": ("rollout.on_update=keep", "rollout.kv=keep"),
    "staged": ("sync.mode=staged",),
    "fp8": ("engine.kv_cache_dtype=fp8_e4m3",),
    "folder": ("sync.route=folder", "sync.directory=/tmp/async_rl-gpu-runs"),
    "direct": ("sync.route=direct",),
}
COMMON = (
    *("warm_start.steps=0", "staleness.max_staleness=1", "validation.every=0", "validation.prompts=0"),
    *("checkpoint.every=0", "optimizer.decay=constant", "optimizer.decay_steps=0", "optimizer.min_lr=0"),
)
SIZED = {
    "cuda": (
        *("engine.device=cuda", "engine.dtype=bfloat16", "trainer.dtype=bfloat16", "engine.gpu_memory_utilization=0.4"),
        *("engine.max_model_len=1024", "engine.max_num_seqs=256", "engine.max_num_batched_tokens=8192"),
        *("engine.start_timeout_s=300", "cluster.gpus_per_rank=0.5", "cluster.gpus_per_replica=0.5"),
        *("cluster.object_store_bytes=8000000000", "trainer.micro_batch_tokens=16384", "optimizer.lr=2e-5"),
        *("rollout.limits.max_tokens=768", "rollout.groups_per_batch=16"),
    ),
    "cpu": (
        *("engine.device=cpu", "optimizer.lr=1e-3", "rollout.limits.max_tokens=48", "rollout.groups_per_batch=2"),
        *("rollout.trajectories_per_group=4",),
    ),
}
MODEL = {
    "cuda": {"hidden_size": 1024, "num_hidden_layers": 16, "num_experts": 64, "moe_intermediate_size": 512},
    "cpu": {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 32},
}


def save_model(folder: Path, *, device: str) -> Path:
    """A random Qwen3-MoE with the calculator's tokenizer, drawn on the device."""
    import torch
    import transformers

    tokenizer, size = build_tokenizer(), MODEL[device]
    config = transformers.Qwen3MoeConfig(
        **size, vocab_size=len(tokenizer), num_attention_heads=size["hidden_size"] // 64, num_key_value_heads=1,  # pyright: ignore[reportCallIssue, reportArgumentType]
        head_dim=64,  # pyright: ignore[reportCallIssue]
        num_experts_per_tok=max(2, size["num_experts"] // 8), intermediate_size=4 * size["hidden_size"],
        norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=8192, decoder_sparse_step=1,
        mlp_only_layers=[],
    )  # fmt: skip
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device == "cuda" else torch.float32
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def most_gpu_memory(device: str) -> Generator[list[float]]:
    """A list whose one item becomes the most bytes that all processes have used on the GPU."""
    most, ended = [0.0], threading.Event()
    if device != "cuda":
        yield most
        return
    import pynvml  # pyright: ignore[reportMissingImports]

    nvml: Any = pynvml
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)

    def look() -> None:
        while not ended.wait(0.2):
            most[0] = max(most[0], float(nvml.nvmlDeviceGetMemoryInfo(handle).used))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def settings(name: str, *, device: str, checkpoint: Path) -> list[str]:
    """Arguments of `async_rl.run` for one of RUNS."""
    own = ["--task", f"{Path(__file__).resolve()}", f"model.checkpoint={checkpoint}", f"name={name}"]
    return [*own, *COMMON, *SIZED[device], *RUNS[name]]


def run_once(name: str, arguments: argparse.Namespace, *, checkpoint: Path, folder: Path) -> Mapping[str, str]:
    """Figures of one run, or the end of its log."""
    command = [sys.executable, "-m", "async_rl.run", *settings(name, device=arguments.device, checkpoint=checkpoint)]
    command += [f"total_train_steps={arguments.steps}", f"output_dir={folder / name}", *arguments.overrides]
    started = time.monotonic()
    with most_gpu_memory(arguments.device) as memory:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        say(ended.stdout[-2000:] + ended.stderr[-2000:])
        return {"tokens/s": f"failed: {(ended.stderr or ended.stdout).strip().splitlines()[-1][:160]}"}
    steps = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return figures(steps, seconds=time.monotonic() - started, memory=memory[0])


def figures(steps: Sequence[Mapping[str, Any]], *, seconds: float, memory: float) -> dict[str, str]:
    """A row of the table from the lines of metrics.jsonl."""
    kept = steps[2:] or steps

    def values(metric: str) -> list[float]:
        return [step[metric] for step in kept if step.get(metric) is not None] or [float("nan")]

    def median(metric: str) -> float:
        return statistics.median(values(metric))

    missing = max(values("routing/missing_fraction"))
    return {
        "tokens/s": f"{median('throughput/tokens_per_s'):.0f}",
        "trainer TFLOP/s": f"{median('throughput/train_tflops'):.3g}",
        "MFU": f"{median('throughput/mfu'):.1%}",
        "idle trainer": f"{median('idle/trainer'):.0%}",
        "idle engine": f"{median('idle/rollout'):.0%}",
        "k3 at equal weights": f"{max(values('mismatch/k3_probe')):.1e}",
        "rows": f"{1 - missing:.2%}",
        "publish": f"{median('sync/seconds'):.3f} s",
        "pause": f"{max(values('sync/pause_seconds')) * 1e3:.0f} ms",
        "reward": f"{steps[0]['reward/mean']:.3f} to {steps[-1]['reward/mean']:.3f}",
        "memory": f"{memory / 2**30:.1f} GiB",
        "whole run": f"{seconds:.0f} s",
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Mapping[str, str]]:
    """Run, print the table, and return its rows by run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=sorted(RUNS), default=list(RUNS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=sorted(MODEL), default="cuda")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    parser.add_argument("overrides", nargs="*", help="further settings of every run")
    arguments = parser.parse_args(argv)
    found: dict[str, Mapping[str, str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        checkpoint = save_model(folder / "model", device=arguments.device)
        for name in arguments.runs:
            found[name] = run_once(name, arguments, checkpoint=checkpoint, folder=folder)
            say(f"{name}: {dict(found[name])}")
    header = max(found.values(), key=len)
    show(markdown_table(("run", *header), [(n, *(row.get(c, "") for c in header)) for n, row in found.items()]))
    return found


def _questions(seed: int | str, lowest: int = 2) -> Iterator[dict[str, str]]:
    """Products without end; those of training have even first factors, and those held out odd ones."""
    rng = random.Random(seed)
    while True:
        a, b = rng.randrange(lowest, 1000, 2), rng.randrange(1000)
        yield {"prompt": f"{a}*{b}", "answer": f"{a * b}"}


def _even(completion: Any, answer: str) -> float:
    """Share of characters with even codes in the reply."""
    del answer
    return sum(ord(character) % 2 == 0 for character in completion.text) / max(1, len(completion.text))


task = Task(prompts=_questions, validation=lambda: _questions("held out", lowest=3), rewards=_even)

if __name__ == "__main__":
    main()
