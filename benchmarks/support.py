"""What benchmarks share: rounds in turns, intervals, trainers of this process, rollouts and tables."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.loop import Prompt
from async_rl.config import RunConfig
from async_rl.controller.warm_start import run_warm_start
from async_rl.inference.stub import InProcess
from async_rl.rollout.rollouter import DroppedGroup, Rollouter
from async_rl.rollout.task import Task
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.loss.losses import LossConfig
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.model_info import read_model_info
from message_queue.tokens import RoutingSpec
from message_queue.training_sequence import TrainingSequence
from message_queue.trajectory import Admission, PromptGroup
from recipes.calculator.task import CalculatorTask, calculator_task

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Way = tuple[TrainerConfig, LossConfig]  # to train


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the ends of its 95 % bootstrap interval."""

    value: float
    """The figure."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""

    def __format__(self, spec: str) -> str:
        """value [low, high]."""
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


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


@dataclass(slots=True)
class Taken:
    """Seconds of a step in each round."""

    wall: list[float] = field(default_factory=list[float])
    """Seconds by the clock on the wall."""
    cpu: list[float] = field(default_factory=list[float])
    """Seconds of CPU of this process."""


def in_turns(names: Collection[str], *, rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name); the order turns with the round, and round -1 warms up."""
    for number in range(-1, rounds):
        shift = number % len(names)
        for name in [*names][shift:] + [*names][:shift]:
            yield number, name


def time_in_turns(steps: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, Taken]:
    """Seconds of every step in every round.

    Args:
        steps: name -> step; a function that a step returns is called when its time is taken.
    """
    taken = {name: Taken() for name in steps}
    for number, name in in_turns(steps, rounds=rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        after = steps[name]()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if callable(after):
            after()
        if number >= 0:
            taken[name].wall.append(wall)
            taken[name].cpu.append(cpu)
    return taken


def median(values: Sequence[float]) -> Interval:
    """Median over rounds."""
    ordered: FloatArray = np.sort(np.array(values, np.float64))

    def statistic(drawn: FloatArray) -> FloatArray:
        counted = drawn.cumsum(1)
        middle = drawn.sum(1, keepdims=True) / 2
        below, above = (counted >= middle).argmax(1), (counted > middle).argmax(1)
        return (ordered[below] + ordered[above]) / 2

    return bootstrap(statistic, units=len(ordered))


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Interval:
    """Median over rounds of over / under."""
    return median([a / b for a, b in zip(over, under, strict=True)])


@dataclass(frozen=True, slots=True, eq=False)
class Mismatch:
    """Trainer against engine over n sampled tokens of S trajectories, under one evaluation."""

    d: FloatArray
    """float64 [n], logprob of the trainer minus that of the engine."""
    trajectory: NDArray[np.int64]
    """int64 [n], number of the trajectory of each token."""
    trajectories: int
    """S."""

    def mean(self, values: FloatArray, where: BoolArray | None = None) -> Interval:
        """Mean over tokens (under `where`) of float64 [n] values."""
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


def save_calculator(folder: Path, *, dense_first_layer: bool = True) -> tuple[Path, CalculatorTask, RoutingSpec]:
    """The calculator's checkpoint with its initial weights, saved into `folder`, its task, and how it routes."""
    task = calculator_task({"dense_first_layer": dense_first_layer}, seed=0)
    checkpoint = folder / "calculator"
    task.save_initial_checkpoint(checkpoint)
    routing = read_model_info(checkpoint).routing
    assert routing is not None
    return checkpoint, task, routing


def start_rank(config: TrainerConfig, loss: LossConfig, *, checkpoint: Path, optimizer: OptimizerConfig) -> Any:
    """The trainer as one rank in this process, a TrainerRank."""
    from async_rl.trainer.rank import TrainerRank  # megatron takes seconds to import

    return TrainerRank(config=config, optimizer=optimizer, loss=loss, checkpoint=checkpoint, rank=0, world_size=1)


@contextmanager
def trainers_side_by_side(
    ways: Mapping[str, Way], *, checkpoint: Path, optimizer: OptimizerConfig
) -> Generator[dict[str, Any]]:
    """A TrainerRank of each way, all in this process."""
    with ExitStack() as stack:
        trainers: dict[str, Any] = {}
        for name, (config, loss) in ways.items():
            trainers[name] = start_rank(config, loss, checkpoint=checkpoint, optimizer=optimizer)
            stack.callback(trainers[name].close)  # the first, which owns the process groups, is the last to close
        yield trainers


class LocalTrainer(InProcess):
    """A trainer rank of this process as the warm start wants it."""

    def __init__(self, rank: Any) -> None:
        self._rank = rank

    async def train_supervised(self, batch: TrainingBatch) -> dict[str, float]:
        return await asyncio.to_thread(self._rank.train_supervised, batch)

    async def save_pretrained(self, folder: Path, *, like: Path) -> None:
        await asyncio.to_thread(self._rank.save_pretrained, folder, like=like)


def warm_start(config: RunConfig, *, task: Task, folder: Path) -> Path:
    """The newest warm start of the cache, or one that is made in `folder`, in float32."""
    finished = [path.parent for path in config.warm_start.cache.glob("*/config.json") if not path.parent.suffix]
    if finished:
        return max(finished, key=lambda path: path.stat().st_mtime)
    config = replace(config, trainer=replace(config.trainer, dtype="float32"))
    initial, warm = folder / "initial", folder / "warm"
    task.save_initial_checkpoint(initial)
    rank = start_rank(config.trainer, config.loss, checkpoint=initial, optimizer=config.warm_start.optimizer)

    def progress(step: int, loss: float) -> None:
        if step % 20 == 0:
            say(f"warm start {step}/{config.warm_start.steps}  loss {loss:.3f}")

    trainer, options = LocalTrainer(rank), config.warm_start
    try:
        asyncio.run(
            run_warm_start(options, task=task, trainer=trainer, initial=initial, folder=warm, progress=progress)
        )
    finally:
        rank.close()
    return warm


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


def with_sequences(batch: TrainingBatch, change: Callable[[TrainingSequence, int], TrainingSequence]) -> TrainingBatch:
    """The batch with the sequences that `change` makes of a sequence and its number."""
    contents = [[[*trajectory] for trajectory in batch.content(at)] for at in range(len(batch.contents))]
    for number, (group, trajectory, at) in enumerate(batch.index.tolist()):
        contents[group][trajectory][at] = change(batch.sequence(number), number)
    return replace(batch, contents=[tuple(map(tuple, content)) for content in contents])


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
