"""What it costs to check that an engine serves what was published, on the model of the default run.

    checksum   a publish with the checksums of the live parameters against one without
    probe      the trainer's part, TrainerRank.hold and .score, against its train step and against a publish

A publish is pause, abort, load and resume of one idle replica in this process; the publishes take turns, and so do the
parts of the trainer. The engine decodes the probe after a publish, beside the rollouts. Intervals are 95 % bootstrap
over rounds.

    python benchmarks/load_checks.py [--engines vllm sglang] [--publishes 100] [--steps 12]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_loop.engine import EngineError
from agent_loop.tools import PauseGate
from async_rl.config import MismatchConfig, RunConfig, load_config
from async_rl.inference.publisher import Publisher
from async_rl.inference.select import actor_environment, start_replica
from async_rl.inference.sglang import server as sglang_server
from async_rl.inference.sglang.config import SglangConfig
from async_rl.inference.vllm import engine as vllm_engine
from async_rl.inference.vllm import worker as vllm_worker
from async_rl.inference.vllm.worker import LoadsUpdates
from async_rl.trainer.batch.training_batch import TrainingBatch, supervised_batch
from async_rl.weights.live import LiveWeights
from async_rl.weights.transport import WeightUpdate
from benchmarks import load_checks_sglang
from benchmarks.support import Interval, RolloutsHere, figure, markdown_table, save_calculator, say, show, start_rank
from benchmarks.train_steps import Taken, as_rollouts, paired_ratio, time_in_turns
from message_queue.tokens import RoutingSpec
from recipes.calculator.task import CalculatorTask
from tests.helpers.updates import write_update

EXTENSION = "benchmarks.load_checks.SwitchedLoads"
GOAL = 0.02  # of a publish

Switch = Callable[[bool], Awaitable[None]]
Pair = tuple[Taken, Taken]  # without and with checksums


class SwitchedLoads(LoadsUpdates):
    """vLLM's side: loads that leave the checksums out after `compute_checksums(False)`."""

    originals: tuple[Any, ...] | None = None

    def compute_checksums(self, on: bool) -> None:
        cpu: Any = importlib.import_module("async_rl.compat.vllm")  # imports vLLM, which this process does not
        parts = (vllm_worker.model_contents, vllm_worker.sums_for, cpu.content)
        first = SwitchedLoads.originals = SwitchedLoads.originals or parts
        without = (*load_checks_sglang.WITHOUT, lambda tensor: load_checks_sglang.no_content())
        vllm_worker.model_contents, vllm_worker.sums_for, cpu.content = first if on else without


async def start(config: RunConfig, *, checkpoint: Path, folder: Path) -> tuple[Any, Switch]:
    """A replica, and a call that says whether its later loads compute checksums."""
    if isinstance(config.engine, SglangConfig):
        plugin, environment = load_checks_sglang.plugin_folder(folder), sglang_server.server_environment

        def with_plugin(*args: Any, **options: Any) -> dict[str, str]:
            made = environment(*args, **options)
            return made | {"PYTHONPATH": f"{made['PYTHONPATH']}:{plugin}"}

        async def switch_sglang(on: bool) -> None:
            load_checks_sglang.switch(plugin, on=on)

        with mock.patch.object(sglang_server, "server_environment", with_plugin):
            replica = await start_replica(config.engine, name="replica-0", checkpoint=checkpoint, capture_routing=True)
        return replica, switch_sglang
    arguments = vllm_engine.engine_args

    def with_extension(*args: Any, **options: Any) -> dict[str, Any]:
        return arguments(*args, **options) | {"worker_extension_cls": EXTENSION}

    with mock.patch.object(vllm_engine, "engine_args", with_extension):
        started: Any = await start_replica(config.engine, name="replica-0", checkpoint=checkpoint, capture_routing=True)

    async def switch_vllm(on: bool) -> None:
        await started.backend.engine.collective_rpc("compute_checksums", args=(on,))

    return started, switch_vllm


async def time_publishes(replica: Any, updates: Sequence[WeightUpdate], switch: Switch, *, rounds: int) -> Pair:
    """Seconds of publishes without and with checksums; the first rounds warm up."""
    publisher = Publisher([replica], on_update="resume", rollouts=RolloutsHere(PauseGate()), timeout_s=120.0)
    taken, version = {False: Taken(), True: Taken()}, 0
    processes = psutil.Process().children(recursive=True)
    for number in range(-3, rounds):
        for on in (False, True) if number % 2 else (True, False):
            await switch(on)
            version = 1 - version
            before, own = cpu_seconds(processes), time.process_time()
            # Without contents nothing can be compared.
            with contextlib.nullcontext() if on else mock.patch.object(LiveWeights, "replace", lambda *loads: []):
                report = await publisher.publish(updates[version])
            own = time.process_time() - own
            if number >= 0:
                taken[on].wall.append(report.seconds)
                taken[on].cpu.append(cpu_seconds(processes) - before + own)
    return taken[False], taken[True]


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Used so far by the threads of `processes`, finer than psutil tells."""
    threads = (path for process in processes for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"))
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


async def publishes_of(config: RunConfig, *, checkpoint: Path, folder: Path, rounds: int) -> Pair:
    """As `time_publishes`, of an engine that is started for it."""
    tensors = load_file(checkpoint / "model.safetensors")
    moved = {name: tensor + 1e-3 for name, tensor in tensors.items()}
    updates = [write_update(folder / "updates", version=i, tensors=t.items()) for i, t in enumerate((tensors, moved))]
    replica, switch = await start(config, checkpoint=checkpoint, folder=folder)
    try:
        return await time_publishes(replica, updates, switch, rounds=rounds)
    finally:
        await replica.close()


def probe_batch(task: CalculatorTask, routing: RoutingSpec, *, config: MismatchConfig) -> TrainingBatch:
    """Sequences as those of a probe: prompts with the tokens that an engine samples for them."""
    examples: list[Any] = []
    for ids, mask in task.demonstrations(0, config.prompts):
        sampled = np.arange(int(mask.argmax()) + config.tokens) >= mask.argmax()
        examples.append((np.resize(ids, len(sampled)), sampled))
    return as_rollouts(supervised_batch(examples), routing)


def time_trainer(
    config: RunConfig, *, checkpoint: Path, task: CalculatorTask, routing: RoutingSpec, rounds: int
) -> dict[str, Taken]:
    """Seconds of a train step and of the trainer's part of a probe, in every round."""
    rollout = config.rollout
    sequences = rollout.groups_per_batch * rollout.trajectories_per_group
    batch = as_rollouts(supervised_batch(task.demonstrations(0, sequences)), routing)
    probe = probe_batch(task, routing, config=config.mismatch)
    rank = start_rank(config, checkpoint=checkpoint, optimizer=config.optimizer)
    steps = {"train": lambda: rank.train(batch), "hold": rank.hold, "score": lambda: rank.score(probe)}
    rank.snapshot_weights()
    try:
        return time_in_turns(steps, rounds=rounds)
    finally:
        rank.close()


def more(checked: Sequence[float], plain: Sequence[float]) -> str:
    """Median over rounds of checked / plain, less 1."""
    ratio = paired_ratio(checked, plain)
    return figure(Interval(ratio.value - 1, ratio.low - 1, ratio.high - 1), percent=True)


def table(publishes: Mapping[str, Pair], trainer: Mapping[str, Taken]) -> str:
    """A row per engine, and one of the trainer."""
    rows: list[Sequence[str]] = []
    for engine, (plain, checked) in publishes.items():
        rows.append(row(f"checksum, {engine}", "publish", plain, checked))
    train, hold, score = (trainer[name] for name in ("train", "hold", "score"))
    probed = Taken(
        wall=[sum(parts) for parts in zip(train.wall, hold.wall, score.wall, strict=True)],
        cpu=[sum(parts) for parts in zip(train.cpu, hold.cpu, score.cpu, strict=True)],
    )
    rows.append(row("probe: hold + score", "train step", train, probed))
    header = ("check", "of", "ms of it", "ms of the check", "more wall time", "more CPU time")
    return markdown_table(header, rows)


def row(check: str, of: str, plain: Taken, checked: Taken) -> Sequence[str]:
    """Milliseconds are medians of CPU time, which other processes disturb least."""
    added = np.subtract(checked.cpu, plain.cpu)
    return (
        check,
        of,
        f"{statistics.median(plain.cpu) * 1e3:.2f}",
        f"{statistics.median(added) * 1e3:.2f}",
        more(checked.wall, plain.wall),
        more(checked.cpu, plain.cpu),
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("vllm", "sglang"), default=("vllm", "sglang"))
    parser.add_argument("--publishes", type=int, default=100, help="rounds of a publish with and one without checksums")
    parser.add_argument("--steps", type=int, default=12, help="rounds of a train step, a hold and a score")
    args = parser.parse_args(arguments)
    for name in ("publishes", "steps"):
        if getattr(args, name) < 2:
            parser.error(f"--{name} is {getattr(args, name)}; intervals need at least 2")
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    warnings.simplefilter("ignore")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    publishes: dict[str, Pair] = {}
    with tempfile.TemporaryDirectory(prefix="async_rl-") as name:
        for engine in args.engines:
            config, folder = load_config([f"engine={engine}"]), Path(name) / engine
            served, *_ = save_calculator(folder, dense_first_layer=engine != "sglang")  # which knows none
            try:
                with mock.patch.dict(os.environ, actor_environment(config.engine)):
                    publishes[engine] = asyncio.run(
                        publishes_of(config, checkpoint=served, folder=folder, rounds=args.publishes)
                    )
            except EngineError as error:
                say(f"{engine} is left out: {error}")
        torch.manual_seed(0)
        checkpoint, task, routing = save_calculator(Path(name))
        trainer = time_trainer(load_config([]), checkpoint=checkpoint, task=task, routing=routing, rounds=args.steps)
    show(f"{args.publishes} rounds of publishes, {args.steps} of train steps (goal {GOAL:.0%} of a publish)\n")
    show(table(publishes, trainer))


if __name__ == "__main__":
    main()
