"""Pause of a replica in a publish, at_once and staged, for dense models of several sizes with equal numbers of tensors.

One replica of vLLM in this process; publishes take turns between the two modes, with `rollout.on_update=resume`. The
pause is that of the publisher's report, from the pause to the resume. The replica is idle: a request in flight would
add the rest of a forward pass, whose time depends on the size too. Intervals are 95 % bootstrap over publishes.

    python benchmarks/publish_pauses.py [--mb 10 100 1000] [--publishes 12] [--directory /dev/shm]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_loop.tools.tool import PauseGate
from async_rl.inference.publisher import Publisher
from async_rl.inference.vllm.config import VllmConfig, engine_environment
from async_rl.inference.vllm.engine import VllmReplica, start_vllm
from async_rl.weights.transport import WeightUpdate, read_tensors
from benchmarks.support import FloatArray, Interval, RolloutsHere, bootstrap, markdown_table, say, show
from message_queue.tokens import WeightVersion
from tests.helpers.updates import write_update

CONFIG = VllmConfig(device="cpu", dtype="bfloat16", threads=1, load_timeout_s=600)
LAYERS = 4
SETS = 3  # of weights; a staged version replaces those of the version before the last
CHANNELS = 64  # of a head; vLLM's attention on the CPU knows few sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """Pauses of a replica with one model."""

    num_bytes: int
    """Of the weights."""
    at_once: Interval
    """Seconds."""
    staged: Interval
    """Seconds."""


async def measure_pauses(mb: int, *, directory: Path, publishes: int) -> Pauses:
    """Medians of `publishes` pauses of each mode, for a model of about `mb` megabytes."""
    updates = save_model(mb, directory)
    replica = await start_vllm(CONFIG, name="replica-0", checkpoint=directory / "0", capture_routing=False)
    pauses: dict[bool, list[float]] = {False: [], True: []}
    try:
        for number in range(2 * publishes + 2):
            staged = bool(number % 2)
            update = updates[(number + 1) % SETS]
            update = replace(update, weights=WeightVersion(number + 1, update.weights.digest))
            pause = await pause_of(replica, update, staged=staged)
            say(f"{mb} MB, {'staged' if staged else 'at_once'}: {1000 * pause:.1f} ms")
            if number > 1:  # the first staged version makes the twin
                pauses[staged].append(pause)
    finally:
        await replica.close()
    at_once, staged_pause = (median(np.array(pauses[staged])) for staged in (False, True))
    size = sum(path.stat().st_size for path in (directory / "0").glob("*.safetensors"))
    return Pauses(num_bytes=size, at_once=at_once, staged=staged_pause)


async def pause_of(replica: VllmReplica, update: WeightUpdate, *, staged: bool) -> float:
    """Seconds of the pause of a publish."""
    rollouts = RolloutsHere(PauseGate())
    publisher = Publisher([replica], on_update="resume", rollouts=rollouts, staged=staged, timeout_s=600)
    return (await publisher.publish(update)).pause_seconds


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


def milliseconds(pause: Interval) -> str:
    """value [low, high]."""
    return f"{1000 * pause.value:.1f} [{1000 * pause.low:.1f}, {1000 * pause.high:.1f}]"


def median(values: FloatArray) -> Interval:
    """Median with its interval."""

    def statistic(drawn: FloatArray) -> FloatArray:
        return np.array([float(np.median(np.repeat(values, row.astype(int)))) for row in drawn])

    return bootstrap(statistic, units=len(values))


async def measure(args: argparse.Namespace) -> None:
    rows: list[list[str]] = []
    staged: list[Interval] = []
    for mb in args.mb:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            found = await measure_pauses(mb, directory=Path(directory), publishes=args.publishes)
        rows.append([f"{found.num_bytes / 1e6:.0f} MB", milliseconds(found.at_once), milliseconds(found.staged)])
        staged.append(found.staged)
    show(markdown_table(["model", "at_once: pause ms", "staged: pause ms"], rows))
    show(f"staged: largest pause over smallest {max(p.value for p in staged) / min(p.value for p in staged):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[10, 100, 1000], help="of the models")
    parser.add_argument("--publishes", type=int, default=12, help="of each mode")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    os.environ.update(engine_environment(CONFIG))
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
