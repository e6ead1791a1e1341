"""What benchmarks share: checkpoints of the calculator task, trainers of this process, rollouts, and intervals."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.loop import Prompt
from agent_loop.tools import PauseGate
from async_rl.config import RunConfig
from async_rl.controller.warm_start import run_warm_start
from async_rl.inference.stub import InProcess
from async_rl.rollout.rollouter import DroppedGroup, Rollouter
from async_rl.rollout.task import Task
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.loss.losses import DecoupledPPO, LossConfig
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.model_info import read_model_info
from message_queue.queue import Admission
from message_queue.tokens import RoutingSpec
from message_queue.trajectory import PromptGroup
from recipes.calculator.task import CalculatorTask, calculator_task

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the ends of its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def bootstrap(
    statistic: Callable[[FloatArray], FloatArray], *, units: int, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile interval over resampled units.

    Args:
        statistic: float64 [B, units], how often each unit was drawn -> float64 [B], NaN where a draw has no figure.
    """
    drawn = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), size=resamples)
    low, high = np.nanquantile(statistic(drawn.astype(np.float64)), (0.025, 0.975))
    return Interval(float(statistic(np.ones((1, units)))[0]), float(low), float(high))


@dataclass(frozen=True, slots=True, eq=False)
class Mismatch:
    """Trainer against engine over n sampled tokens of S trajectories, under one evaluation.

    d: float64 [n]. trajectory: int64 [n], whose token it is. trajectories: S.
    """

    d: FloatArray
    trajectory: NDArray[np.int64]
    trajectories: int

    def mean(self, values: FloatArray, where: BoolArray | None = None) -> Interval:
        """Mean over tokens (of those under `where`) of float64 [n] values."""
        kept = np.ones(len(values)) if where is None else where.astype(np.float64)
        total = np.bincount(self.trajectory, weights=values * kept, minlength=self.trajectories)
        count = np.bincount(self.trajectory, weights=kept, minlength=self.trajectories)

        def statistic(drawn: FloatArray) -> FloatArray:
            tokens = drawn @ count
            return np.divide(drawn @ total, tokens, out=np.full(len(drawn), np.nan), where=tokens > 0)

        return bootstrap(statistic, units=self.trajectories)

    @property
    def k3(self) -> FloatArray:
        return np.expm1(self.d) - self.d


def figure(interval: Interval, *, percent: bool = False) -> str:
    """value [low, high]."""
    if percent:
        return f"{interval.value:.2%} [{interval.low:.2%}, {interval.high:.2%}]"
    return f"{interval.value:.2e} [{interval.low:.2e}, {interval.high:.2e}]"


class CpuClock:
    """CPU seconds used by this process and, with all their children, by actors."""

    def __init__(self, actors: dict[str, int]) -> None:
        """actors: name -> process id."""
        import psutil  # only a profile needs it

        self._processes = {"driver": [psutil.Process()]}
        for name, pid in actors.items():
            actor = psutil.Process(pid)
            self._processes |= {name: [actor], f"engine of {name}": actor.children(recursive=True)}

    def seconds(self) -> dict[str, float]:
        """Since the start of each process."""
        return {name: sum(sum(p.cpu_times()[:2]) for p in group) for name, group in self._processes.items()}


def save_calculator(folder: Path, *, dense_first_layer: bool = True) -> tuple[Path, CalculatorTask, RoutingSpec]:
    """The calculator's checkpoint with its initial weights, saved into `folder`, its task, and how it routes."""
    task = calculator_task({"dense_first_layer": dense_first_layer}, seed=0)
    checkpoint = folder / "calculator"
    task.save_initial_checkpoint(checkpoint)
    routing = read_model_info(checkpoint).routing
    assert routing is not None
    return checkpoint, task, routing


def start_rank(config: RunConfig, *, checkpoint: Path, optimizer: OptimizerConfig) -> Any:
    """The trainer as one rank in this process, a TrainerRank."""
    return _start(Variant(config=config.trainer, loss=config.loss), checkpoint=checkpoint, optimizer=optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One of the ways to train that are compared."""

    config: TrainerConfig
    loss: LossConfig = field(default_factory=DecoupledPPO)


@contextmanager
def trainers_side_by_side(
    variants: Mapping[str, Variant], *, checkpoint: Path, optimizer: OptimizerConfig
) -> Generator[dict[str, Any]]:
    """A TrainerRank of each variant, all in this process."""
    with ExitStack() as stack:
        trainers: dict[str, Any] = {}
        for name, variant in variants.items():
            trainers[name] = _start(variant, checkpoint=checkpoint, optimizer=optimizer)
            stack.callback(trainers[name].close)  # the first, which owns the process groups, is the last to close
        yield trainers


def _start(variant: Variant, *, checkpoint: Path, optimizer: OptimizerConfig) -> Any:
    from async_rl.trainer.rank import TrainerRank  # megatron takes seconds to import

    return TrainerRank(
        config=variant.config, optimizer=optimizer, loss=variant.loss, checkpoint=checkpoint, rank=0, world_size=1
    )


class LocalTrainer(InProcess):
    """A trainer rank of this process as the warm start wants it."""

    def __init__(self, rank: Any) -> None:
        self._rank = rank

    async def train_supervised(self, batch: TrainingBatch) -> dict[str, float]:
        return await asyncio.to_thread(self._rank.train_supervised, batch)

    async def save_pretrained(self, folder: Path, *, like: Path) -> None:
        await asyncio.to_thread(self._rank.save_pretrained, folder, like=like)


def find_warm_start(cache: Path) -> Path | None:
    """The newest finished warm start under `cache`."""
    finished = [path.parent for path in cache.glob("*/config.json") if not path.parent.suffix]
    return max(finished, key=lambda path: path.stat().st_mtime, default=None)


def make_warm_start(config: RunConfig, *, task: Task, folder: Path) -> Path:
    """Warm-start the task's model into `folder`/warm and return that."""
    initial, warm = folder / "initial", folder / "warm"
    task.save_initial_checkpoint(initial)
    rank = start_rank(config, checkpoint=initial, optimizer=config.warm_start.optimizer)

    def progress(step: int, loss: float) -> None:
        if step % 20 == 0:
            say(f"warm start {step}/{config.warm_start.steps}  loss {loss:.3f}")

    try:
        asyncio.run(
            run_warm_start(
                config.warm_start,
                task=task,
                trainer=LocalTrainer(rank),
                initial=initial,
                folder=warm,
                progress=progress,
            )
        )
    finally:
        rank.close()
    return warm


class RolloutsHere:
    """Rollouts of this process, whose tools a publish pauses."""

    def __init__(self, gate: PauseGate) -> None:
        self._gate = gate

    async def pause(self) -> None:
        self._gate.pause()

    async def resume(self) -> None:
        self._gate.resume()

    async def avoid(self, replicas: Collection[str]) -> None:
        pass


async def roll_groups(
    rollouter: Rollouter, prompts: Sequence[Prompt], *, first_group: int, at_once: int
) -> list[PromptGroup]:
    """Roll out all prompts under version 0, at most `at_once` at a time.

    Raises:
        RuntimeError: a group was dropped; names its reason.
    """
    places = asyncio.Semaphore(at_once)

    async def roll(place: int, prompt: Prompt) -> PromptGroup:
        admission = Admission(group=first_group + place, prompt=prompt.index, admitted_version=0, admitted_update=0)
        async with places:
            outcome = await rollouter.roll(prompt, admission)
        if isinstance(outcome, DroppedGroup):
            raise RuntimeError(f"group {outcome.group} (prompt {prompt.index}) was dropped: {outcome.reason}")
        return outcome

    return list(await asyncio.gather(*(roll(i, p) for i, p in enumerate(prompts))))


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (most since the peak was reset) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_growth(step: Callable[[], object]) -> int:
    """Bytes by which a call raises the peak of this process's resident memory over its memory before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = resident_bytes("VmRSS")
    step()
    return resident_bytes("VmHWM") - before


def say(line: str) -> None:
    """Progress, apart from the table on stdout."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def show(text: str) -> None:
    """A part of the result, on stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table with padded columns."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [header, ["-" * w for w in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines
    )
