"""What the data plane costs as trajectories in flight, their tokens and the rollout workers grow.

    real    driver (`RecoveryLoop`: pipeline, dispatcher, publisher, recorder, planner), queue with its journal, rollout
            workers with agent loops, content files and object store, all messages between them through Ray
    fake    engines (tokens and rows from arrays that are made once, behind the real gate and the real process of a
            replica), the trainer rank (it fetches each batch and makes no gradient), the weights, console, TensorBoard

All trajectories of a size are in flight. In each step the groups of one batch end, are trained, and a version is
published: pause, abort of all requests in flight, load, resume. The step is over when all requests are in flight again.

driver     CPU seconds and resident memory of the driver per step, with long trajectories against short ones. What the
           driver uses in the same time while nothing happens is subtracted. Bound: a ratio of 1.2.
lag        99th percentile of how late a task runs that is due every 10 ms, from the begin of a publish until all
           requests are in flight again, in the driver and in the slowest worker. Bound: 50 ms. Own CPU is the part in
           which the event loop ran itself; the lag of an idle process says what the machine adds.

    python benchmarks/scale.py [--in-flight 1024 10240 51200] [--workers 1 2 4] [--tokens 64 2048] [--steps 3]
        [--replicas 2] [--directory DIR]

A quick look: --in-flight 1024 --workers 1 --steps 2.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import uvloop
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.cluster.actors import MAX_ROLLOUTS, make_collections_rare, start_ray
from async_rl.cluster.clients import ReplicaAddress, ReplicaClient
from async_rl.cluster.queue_client import QueueClient, start_queue
from async_rl.cluster.rollout_workers import WorkerClient, addresses
from async_rl.config import ClusterConfig, RunConfig, load_config
from async_rl.controller.parts import RunParts
from async_rl.controller.recovery import RecoveryLoop, supervised
from async_rl.controller.resume import Resume
from async_rl.inference.pool import PoolReplica, ReplicaPool
from async_rl.metrics.recorder import Recorder
from async_rl.metrics.trace import Trace
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.schedule_replay import NoReplay
from async_rl.trainer.planning import Planner
from benchmarks.scale_processes import (
    FIRST_WORD,
    PROMPT_TOKENS,
    FakeRank,
    FakeTrainer,
    IdleHost,
    LagMeter,
    MeteredRolloutHost,
    ScriptedReplicaHost,
    percentile,
)
from benchmarks.support import markdown_table, save_calculator, say, show
from message_queue.tokens import RoutingSpec
from recipes.calculator.task import CalculatorTask

GROUP, GROUPS_PER_BATCH = 16, 64  # trajectories, groups
BATCH = GROUP * GROUPS_PER_BATCH
MOST_STEPS = 1 << 20  # the run is stopped before
IDLE_S, POLL_S = 2.0, 0.1
MAX_LAG_MS, MAX_RATIO = 50.0, 1.2
LONGEST_S = 600.0  # that a step may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One of the sizes that are measured."""

    in_flight: int
    """Trajectories."""
    workers: int
    """Rollout workers."""
    tokens: int
    """Of a trajectory, about."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """What was measured of a size."""

    cpu_s: list[float] = field(default_factory=list[float])
    """CPU seconds of the driver in each step, less those of the same time while nothing happens."""
    windows: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Of each step: start of the publish, and time at which all requests were in flight again."""
    rss_bytes: int = 0
    """Resident memory of the driver after the last step."""
    lags: dict[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])
    """Samples of `LagMeter` by the name of the process."""

    def lag_ms(self, name: str, *, own: bool = False) -> float:
        """99th percentile during publishes, in the slowest of the processes whose names start with `name`."""
        return max(percentile(self.lags[n], self.windows, column=2 if own else 1) for n in self.lags if name in n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Processes that serve all sizes, one size after the other."""

    checkpoint: Path
    task: CalculatorTask
    routing: RoutingSpec
    replicas: Sequence[ReplicaClient]
    workers: Sequence[WorkerClient]
    trainer: FakeTrainer
    idle: Any
    """Actor with a meter and nothing else."""
    config: RunConfig
    """Of the workers; each size changes parts that they do not use."""


class QueueOfSize:
    """Starts the queue of a run; see `async_rl.controller.processes.Processes`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    async def start_queue(self) -> QueueClient:
        config = self._config
        return start_queue(
            batch_groups=config.rollout.groups_per_batch,
            staleness=config.staleness,
            max_ready=config.queue.max_ready,
            updates_per_batch=1,
            timeout_s=config.queue.timeout_s,
            options={"num_cpus": 0},
        )

    async def replace_trainer(self, lost: FakeTrainer) -> FakeTrainer:
        raise RuntimeError("the fake trainer is lost")


def actor(cls: type, **options: Any) -> Any:
    """A Ray actor of a class of this benchmark."""
    remote: Any = ray.remote(cls)
    return remote.options(num_cpus=0, **options).remote()


async def start_parts(
    *, folder: Path, num_replicas: int, num_workers: int, max_tokens: int, stack: AsyncExitStack
) -> Parts:
    """Start replicas, workers, the trainer rank and the idle process."""
    checkpoint, task, routing = save_calculator(folder, dense_first_layer=False)
    config = load_config(
        [
            "trainer.router_replay=R3",
            "mismatch.prompts=0",
            "validation.prompts=0",
            "checkpoint.every=0",
            f"total_train_steps={MOST_STEPS}",
            f"rollout.trajectories_per_group={GROUP}",
            f"rollout.groups_per_batch={GROUPS_PER_BATCH}",
            f"engine.max_model_len={max_tokens}",
            f"rollout.limits.max_tokens={max_tokens}",
            "task.options={dense_first_layer: false}",
        ]
    )
    hosts = [actor(ScriptedReplicaHost, max_concurrency=1000) for _ in range(num_replicas)]
    replicas = [
        ReplicaClient(ReplicaAddress(actor=host, name=f"replica-{i}", timeout_s=LONGEST_S))
        for i, host in enumerate(hosts)
    ]
    served = [
        host.serve.remote(
            replica.name,
            routing=routing,
            stop_token=task.stop_token_ids[0],
            vocab_size=FIRST_WORD + 64,
            max_tokens=max_tokens,
        )
        for host, replica in zip(hosts, replicas, strict=True)
    ]
    hosts_of_workers = [actor(MeteredRolloutHost, max_concurrency=MAX_ROLLOUTS) for _ in range(num_workers)]
    names = [f"worker-{i}" for i in range(num_workers)]
    started = [
        host.start.remote(config, name=name, checkpoint=checkpoint, replicas=addresses(replicas))
        for host, name in zip(hosts_of_workers, names, strict=True)
    ]
    rank, idle = actor(FakeRank), actor(IdleHost, max_concurrency=4)
    for each in (*hosts, *hosts_of_workers, rank, idle):
        stack.callback(ray.kill, each)
    await asyncio.gather(*served, *started)
    await asyncio.gather(*(host.meter.remote() for host in (*hosts_of_workers, idle)))
    trainer = FakeTrainer([rank], planner=Planner(config=config.trainer, loss=config.loss), timeout_s=LONGEST_S)
    workers = [
        WorkerClient(host, name=name, timeout_s=LONGEST_S, stop_timeout_s=LONGEST_S)
        for host, name in zip(hosts_of_workers, names, strict=True)
    ]
    return Parts(
        checkpoint=checkpoint,
        task=task,
        routing=routing,
        replicas=replicas,
        workers=workers,
        trainer=trainer,
        idle=idle,
        config=config,
    )


class Steps:
    """Takes a run of one size through its steps, and measures them."""

    def __init__(self, parts: Parts, size: Size, *, meter: LagMeter) -> None:
        self._hosts = [replica.address.actor for replica in parts.replicas]
        workers = parts.workers[: size.workers]
        self._metered: dict[str, Any] = {w.name: w._actor for w in workers}  # pyright: ignore[reportPrivateUsage]
        self._idle = parts.idle
        self._trainer = parts.trainer
        self._size = size
        self._meter = meter

    async def measure(self, *, steps: int) -> Seen:
        """Fill, measure the driver while it only asks for the requests in flight as in a step, then make the steps."""
        await self._all_in_flight()
        cpu, started = time.process_time(), time.monotonic()
        while time.monotonic() < started + IDLE_S:
            await self._in_flight()
            await asyncio.sleep(POLL_S)
        idle_rate = (time.process_time() - cpu) / (time.monotonic() - started)
        await self._take_lags()  # those of filling
        seen = Seen()
        for step in range(1, steps + 1):
            self._trainer.exported = asyncio.Event()
            cpu, started = time.process_time(), time.monotonic()
            await asyncio.gather(*(host.release.remote(step * GROUPS_PER_BATCH) for host in self._hosts))
            await self._trainer.exported.wait()
            await self._all_in_flight()
            ended = time.monotonic()
            seen.cpu_s.append(time.process_time() - cpu - idle_rate * (ended - started))
            seen.windows.append((self._trainer.exported_at, ended))
        seen.rss_bytes = psutil.Process().memory_info().rss
        seen.lags = await self._take_lags()
        return seen

    async def _all_in_flight(self) -> None:
        async with asyncio.timeout(LONGEST_S):
            while await self._in_flight() < self._size.in_flight:  # noqa: ASYNC110 - in other processes
                await asyncio.sleep(POLL_S)

    async def _in_flight(self) -> int:
        return sum(await asyncio.gather(*(host.in_flight.remote() for host in self._hosts)))

    async def _take_lags(self) -> dict[str, NDArray[np.float64]]:
        metered = {**self._metered, "idle": self._idle}
        lags = await asyncio.gather(*(host.lags.remote() for host in metered.values()))
        return {"driver": self._meter.take(), **dict(zip(metered, lags, strict=True))}


async def run_size(parts: Parts, size: Size, *, steps: int, directory: Path, meter: LagMeter) -> Seen:
    """A run of its own in `directory`, stopped after its steps."""
    bound = size.in_flight // BATCH - 1
    config = replace(
        parts.config,
        output_dir=directory,
        staleness=replace(parts.config.staleness, max_staleness=bound),
        rollout=replace(parts.config.rollout, workers=size.workers),
    )
    for replica in parts.replicas:
        await replica.address.actor.begin.remote(tokens=size.tokens)
    pool = ReplicaPool(parts.replicas)
    recorder = Recorder(directory, console=None)
    trace = Trace(directory / "trace.json")
    rollouts = Dispatcher(parts.workers[: size.workers], pool=pool, note=say, trace=trace)

    async def no_replica(lost: PoolReplica, /, *, slot: int, name: str) -> PoolReplica:
        raise RuntimeError(f"{lost.name} is lost")

    publisher, supervisor = supervised(config, pool, rollouts=rollouts, start=no_replica, note=recorder.warn)
    run_parts = RunParts(
        processes=QueueOfSize(config),
        publisher=publisher,
        replicas=supervisor,
        rollouts=rollouts,
        routing=parts.routing,
        recorder=recorder,
        trace=trace,
        weights_directory=directory,
        held_out={},
        schedule_replay=NoReplay(),
    )
    recovery = RecoveryLoop(config, run_parts, order=parts.task, resume=Resume(config))
    run = asyncio.create_task(recovery.run(parts.trainer))
    work = asyncio.create_task(Steps(parts, size, meter=meter).measure(steps=steps))
    try:
        await asyncio.wait((run, work), return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
        seen = await work
        run_parts.request_stop()
        await run
        return seen
    finally:
        for task in (run, work):
            task.cancel()
        await asyncio.wait((run, work))
        recorder.close()


async def measure(sizes: Sequence[Size], *, steps: int, replicas: int, directory: Path) -> list[Seen]:
    """All sizes in order, on the same processes."""
    found: list[Seen] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scale-", dir=directory)))
        parts = await start_parts(
            folder=folder,
            num_replicas=replicas,
            num_workers=max(size.workers for size in sizes),
            max_tokens=PROMPT_TOKENS + max(size.tokens for size in sizes),
            stack=stack,
        )
        make_collections_rare()  # as `async_rl.run` does
        meter = LagMeter()
        for number, size in enumerate(sizes):
            started = time.monotonic()
            seen = await run_size(parts, size, steps=steps, directory=folder / f"run-{number}", meter=meter)
            found.append(seen)
            say(
                f"{size.in_flight} in flight, {size.workers} workers, {size.tokens} tokens: "
                f"{1e3 * np.median(seen.cpu_s):.0f} ms of driver CPU per step, lag of driver "
                f"{seen.lag_ms('driver'):.0f} ms, of workers {seen.lag_ms('worker'):.0f} ms, "
                f"{time.monotonic() - started:.0f} s"
            )
    return found


def driver_table(sizes: Sequence[Size], found: Sequence[Seen]) -> str:
    """Driver per step: each number of tokens against the smallest, which comes first."""
    rows: list[list[str]] = []
    base: Seen | None = None
    for size, seen in zip(sizes, found, strict=True):
        if base is None or size.tokens == sizes[0].tokens:
            base = seen
        cpu, rss = np.median(seen.cpu_s) / np.median(base.cpu_s), seen.rss_bytes / base.rss_bytes
        rows.append(
            [
                f"{size.in_flight}",
                f"{size.workers}",
                f"{size.tokens}",
                f"{1e3 * np.median(seen.cpu_s):.0f}",
                f"{cpu:.2f}",
                f"{seen.rss_bytes / 1e6:.0f}",
                f"{rss:.2f}",
                "" if seen is base else f"<= {MAX_RATIO} {'met' if max(cpu, rss) <= MAX_RATIO else 'missed'}",
            ]
        )
    header = ["in flight", "workers", "tokens", "CPU ms/step", "over short", "memory MB", "over short", "bound"]
    return markdown_table(header, rows)


def lag_table(sizes: Sequence[Size], found: Sequence[Seen]) -> str:
    """Lag in the publishes of each size."""
    rows: list[list[str]] = []
    for size, seen in zip(sizes, found, strict=True):
        worst = max(seen.lag_ms("driver"), seen.lag_ms("worker"))
        rows.append(
            [
                f"{size.in_flight}",
                f"{size.workers}",
                f"{size.tokens}",
                f"{np.median([end - begin for begin, end in seen.windows]):.2f}",
                f"{seen.lag_ms('driver'):.0f} ({seen.lag_ms('driver', own=True):.0f})",
                f"{seen.lag_ms('worker'):.0f} ({seen.lag_ms('worker', own=True):.0f})",
                f"{seen.lag_ms('idle'):.0f}",
                f"< {MAX_LAG_MS:.0f} {'met' if worst < MAX_LAG_MS else 'missed'}",
            ]
        )
    header = ["in flight", "workers", "tokens", "publish s", "driver ms (own)", "workers ms (own)", "idle ms", "bound"]
    return markdown_table(header, rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1024, 10240, 51200], help="trajectories")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 2048], help="of a trajectory, about")
    parser.add_argument("--steps", type=int, default=3, help="that are measured of each size")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path(), help="of the journals")
    args = parser.parse_args(arguments)
    for count in args.in_flight:
        if count < BATCH or count % BATCH:
            parser.error(f"--in-flight is {count}; must be a multiple of {BATCH}, the trajectories of a batch")
    for name in ("workers", "tokens"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name} is {min(getattr(args, name))}; must be >= 1")
    for name in ("steps", "replicas"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; must be >= 1")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    sizes = [
        Size(in_flight=in_flight, workers=workers, tokens=tokens)
        for in_flight in args.in_flight
        for workers in args.workers
        for tokens in sorted(args.tokens)
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])  # for the actors
    start_ray(ClusterConfig(object_store_bytes=2 << 30))
    try:
        found = uvloop.run(
            measure(
                sizes,
                steps=args.steps,
                replicas=args.replicas,
                directory=args.directory.resolve(),
            )
        )
    finally:
        ray.shutdown()
    show(f"Driver per step of {BATCH} trajectories\n\n{driver_table(sizes, found)}\n")
    show(f"Lag of event loops in a publish, 99th percentile\n\n{lag_table(sizes, found)}")


if __name__ == "__main__":
    main()
