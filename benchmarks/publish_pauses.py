"""Pause of a replica in a staged publish, for dense models of several sizes with equal numbers of tensors.

One replica of vLLM in this process, with `rollout.on_update=resume`. The pause is that of the publisher's report, from
the pause to the resume. The replica is idle: a request in flight would add the rest of a forward pass, whose time
depends on the size too. Medians have 95 % bootstrap intervals over publishes.

    python benchmarks/publish_pauses.py [--mb 10 100 1000] [--publishes 12] [--directory /dev/shm]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.inference.vllm.config import VllmConfig, engine_environment
from async_rl.inference.vllm.engine import start_vllm
from async_rl.weights.transport import WeightUpdate, read_tensors
from benchmarks.support import Interval, markdown_table, median, say, show
from message_queue.tokens import WeightVersion
from tests.helpers.fakes.rollouts import RolloutsHere
from tests.helpers.updates import write_update

CONFIG = VllmConfig(device="cpu", dtype="bfloat16", threads=1, load_timeout_s=600)
LAYERS = 4
SETS = 3  # of weights; a staged version replaces those of the version before the last
CHANNELS = 64  # of a head; vLLM's attention on the CPU knows few sizes


async def measure(mb: int, *, directory: Path, publishes: int) -> Interval:
    """Milliseconds of the pauses of a model of about `mb` megabytes."""
    updates, pauses, rollouts = save_model(mb, directory), list[float](), RolloutsHere()
    replica = await start_vllm(CONFIG, name="replica-0", checkpoint=directory / "0", capture_routing=False)
    publisher = Publisher(ReplicaPool([replica]), on_update="resume", rollouts=rollouts, staged=True, timeout_s=600)
    try:
        for number in range(publishes + 1):
            update = updates[(number + 1) % SETS]
            update = replace(update, weights=WeightVersion(number + 1, update.weights.digest))
            pause = 1e3 * (await publisher.publish(update)).pause_seconds
            say(f"{mb} MB: {pause:.1f} ms")
            if number:  # the first one makes the twin
                pauses.append(pause)
    finally:
        await replica.close()
    return median(pauses)


def save_model(mb: int, directory: Path) -> list[WeightUpdate]:
    """Save SETS sets of weights as checkpoints 0, 1, ... and as updates, for a Qwen3 of about `mb` megabytes."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    # bytes: LAYERS x (16 hidden^2 of the MLP and attention) x 2
    hidden = max(64, round((mb * 1e6 / (2 * LAYERS * 16)) ** 0.5 / 64) * 64)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // CHANNELS,
        num_key_value_heads=hidden // CHANNELS,
        head_dim=CHANNELS,
        tie_word_embeddings=False,
    )
    updates: list[WeightUpdate] = []
    for seed in range(SETS):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(directory / str(seed), max_shard_size="100GB")
        del model
        tensors = read_tensors(directory / str(seed) / "model.safetensors")
        updates.append(write_update(directory / "updates", version=seed, tensors=tensors))
    return updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[10, 100, 1000], help="sizes of the models")
    parser.add_argument("--publishes", type=int, default=12)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    os.environ.update(engine_environment(CONFIG))
    rows: list[list[str]] = []
    for mb in args.mb:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            pause = asyncio.run(measure(mb, directory=Path(directory), publishes=args.publishes))
            size = (Path(directory) / "0" / "model.safetensors").stat().st_size
        rows.append([f"{size / 1e6:.0f} MB", f"{pause:.1f}"])
    show(markdown_table(["model", "pause, ms"], rows))


if __name__ == "__main__":
    main()
