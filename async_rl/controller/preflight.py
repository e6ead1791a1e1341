"""All checks of a run that read its task, its model and its files; none starts a process."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import AutoTokenizer

from agent_loop.engine import Engine
from agent_loop.loop import Prompt
from agent_loop.programs.program import external
from agent_loop.tools.tool import PauseGate
from agent_loop.user_errors import describe_error, user_line
from async_rl.config import ConfigError, RunConfig
from async_rl.controller.resume import Resume, another_run
from async_rl.controller.summary import run_warnings
from async_rl.controller.warm_start import warm_start_folder
from async_rl.files.masking import MASK
from async_rl.inference.checkpoint_weights import tensor_shapes, weight_files
from async_rl.inference.select import check_engine
from async_rl.inference.sglang.config import SglangConfig
from async_rl.inference.sglang.server import interpreter
from async_rl.metrics.trackers import tracker_problems
from async_rl.rollout.prompts import PromptOrder, prompt_order
from async_rl.rollout.schedule import RunSchedule, ScheduleError, read_schedule
from async_rl.rollout.task import Task, build_task, held_out_sets, missing_methods
from async_rl.rollout.teachers import teacher_of
from async_rl.trainer.model.families import read_shape
from async_rl.trainer.model.layout import layout_problems, weight_problems
from async_rl.weights.model_info import CheckpointError, is_quantized, read_model_info
from async_rl.weights.quantized import dequantization_problems, plain_folder, plain_names
from async_rl.weights.remote import driver_problem
from message_queue.errors import EngineError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """Parts of a run that its checks read."""

    task: Task
    """The task."""
    order: PromptOrder
    """Training prompts."""
    held_out: Mapping[str, Sequence[Prompt]]
    """Name of a set -> its prompts of the validation; empty without validation."""
    schedule: RunSchedule | None
    """Schedule that the run follows."""
    resume: Resume
    """State that it starts from."""
    warnings: Sequence[str]
    """Settings that are far from practice; the run starts with them."""


@dataclass(slots=True)
class _Problems:
    """Problems found so far."""

    of_task: str
    """Name of the user's code in a problem."""
    found: list[str] = field(default_factory=list[str])
    """One line for each."""

    def attempt(self, call: Callable[[], T], *, of: str = "") -> T | None:
        """The result of `call`; None and a problem if it raises. of: name of the code, if not that of the task."""
        try:
            return call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of a user may raise anything
            if isinstance(error, ValueError) and not user_line(error):
                self.found += f"{error}".splitlines()
            else:
                self.found.append(f"{of or self.of_task}: {describe_error(error)}")
            return None


def check_run(config: RunConfig) -> CheckedRun:
    """Check the run as a whole.

    Raises:
        ConfigError: a line per problem, with field, value and way out.
    """
    problems = _Problems(f"task.factory is {config.task.factory}, which failed")
    task = problems.attempt(lambda: build_task(config.task, seed=config.seed))
    order, held_out = None, None
    builds, warm = config.model.checkpoint is None, config.warm_start.steps > 0
    missing = "" if task is None else missing_methods(task, config.task, builds_model=builds, warm_start=warm)
    problems.found += missing.splitlines()
    _check_start(problems, None if missing else task, config)
    if task is not None and not missing.startswith("task.factory"):
        order, held_out = _prompts(problems, task, config)
    schedule = None
    if (directory := config.schedule) is not None:
        schedule = problems.attempt(lambda: _read_schedule(directory, config), of="schedule")
    problems.found += [*tracker_problems(config.tracking), *another_run(config)]
    if task is not None:
        problems.found += _endpoint_problems(task, config)
    if isinstance(url := config.sync.directory, str) and (problem := driver_problem(url)):
        problems.found.append(f"sync.directory is {url}, {problem}")
    resume = problems.attempt(lambda: Resume(config), of="resume")
    if problems.found or task is None or order is None or held_out is None or resume is None:
        raise ConfigError("\n".join(dict.fromkeys(problems.found)))
    warnings = tuple(run_warnings(config, num_held_out=sum(map(len, held_out.values()))))
    return CheckedRun(task=task, order=order, held_out=held_out, schedule=schedule, resume=resume, warnings=warnings)


def check_evaluation(config: RunConfig, checkpoint: Path) -> tuple[Task, Mapping[str, Sequence[Prompt]]]:
    """Check what validating `checkpoint` needs, without a trainer; returns the task and its sets of held-out prompts.

    Raises:
        ConfigError: a line per problem, with field, value and way out.
    """
    problems = _Problems(f"task.factory is {config.task.factory}, which failed")
    task = problems.attempt(lambda: build_task(config.task, seed=config.seed))
    held_out = None
    if not config.validation.prompts:
        problems.found.append("validation.prompts is 0, so there is nothing to evaluate; give a number of prompts")
    problems.found += [*_engine_problems(config, checkpoint), *tokenizer_problems(config, checkpoint, task)]
    problems.found += _quantization_problems(config, checkpoint)
    if task is not None:
        held_out = problems.attempt(lambda: held_out_sets(task.validation_prompts(config.validation.prompts)))
    if config.validation.prompts and held_out is not None and not any(held_out.values()):
        problems.found.append(f"task.factory is {config.task.factory}, which holds out no prompt; set its validation")
    if problems.found or task is None or held_out is None:
        raise ConfigError("\n".join(dict.fromkeys(problems.found)))
    return task, held_out


def model_problems(config: RunConfig, checkpoint: Path) -> Iterator[str]:
    """Why a model cannot be trained or served as `config` says."""
    try:
        shape = read_shape(checkpoint)
        read_model_info(checkpoint)
    except CheckpointError as error:
        yield f"model.checkpoint: {error}"
        return
    yield from layout_problems(shape, config.trainer)
    yield from _engine_problems(config, checkpoint)
    try:
        names = {*plain_names(tensor_shapes(weight_files(checkpoint)))}
    except CheckpointError as error:
        yield f"model.checkpoint: {error}"
    else:
        yield from (f"model.checkpoint is {checkpoint}: {problem}" for problem in weight_problems(shape, names))
        yield from _quantization_problems(config, checkpoint)


def _quantization_problems(config: RunConfig, checkpoint: Path) -> Iterator[str]:
    """Why the plain copy of a quantized checkpoint cannot be made."""
    if is_quantized(checkpoint):
        yield from dequantization_problems(checkpoint, folder=plain_folder(checkpoint, cache=config.model.cache))


def _engine_problems(config: RunConfig, checkpoint: Path) -> Iterator[str]:
    """Why the engine cannot serve a model."""
    try:
        info = read_model_info(checkpoint)
        check_engine(
            config.engine,
            checkpoint=checkpoint,
            capture=config.captures_routing and info.routing is not None,  # layout_problems refuses a dense model
            force=config.forces_routing and info.routing is not None,
        )
    except CheckpointError as error:
        yield f"model.checkpoint: {error}"
    except ValueError as error:
        yield from f"{error}".splitlines()


def tokenizer_problems(config: RunConfig, checkpoint: Path, task: Task | None) -> Iterator[str]:
    """Why the tokenizer of a checkpoint does not suit the model, or why the task cannot use it."""
    if not (checkpoint / "config.json").is_file():
        return  # `model_problems` refuses the folder
    there = f"model.checkpoint is {checkpoint}"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    except Exception as error:  # noqa: BLE001 - the libraries raise many kinds
        cause = describe_error(error).partition(". ")[0]
        yield f"{there}, whose tokenizer cannot be loaded: {cause}; copy tokenizer.json and tokenizer_config.json there"
        return
    files = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    if not any((checkpoint / name).is_file() for name in files):  # transformers makes an empty one
        yield f"{there}, which has no tokenizer; copy tokenizer.json and tokenizer_config.json there"
        return
    try:
        vocab_size: float = read_model_info(checkpoint).vocab_size
    except CheckpointError:
        vocab_size = math.inf  # `model_problems` refuses the model
    last = max(tokenizer.get_vocab().values(), default=-1)
    if last >= vocab_size:
        yield (
            f"{there}, whose tokenizer has ids up to {last}, and config.json has vocab_size={vocab_size}; they do not "
            "belong together: copy the tokenizer of this model"
        )
    if task is None:
        return
    try:
        if task.program is not None:
            task.chat(tokenizer)
        else:
            task.build_loop(
                engine=cast(Engine, None),
                tokenizer=tokenizer,
                sampling=config.rollout.sampling,
                limits=config.rollout.limits,
                gate=PauseGate(),
            )
    except Exception as error:  # noqa: BLE001 - code of a user may raise anything
        if tokenizer.chat_template is None:
            yield f"{there}, whose tokenizer has no chat template; copy chat_template.jinja of an instruct model there"
        else:
            yield (
                f"{there}, on whose tokenizer the agent loop of task.factory={config.task.factory} cannot be built: "
                f"{describe_error(error)}"
            )
        return
    try:
        task.measure_prompts(tokenizer, config.rollout.limits)  # from now on
    except ValueError as error:
        yield f"{error}"


def teacher_problems(config: RunConfig, student: Path) -> Iterator[str]:
    """Why a teacher cannot be served, or cannot score the tokens of the student; each names `teachers.NAME`.

    Args:
        student: the checkpoint that is trained.
    """
    for name, teacher in config.teachers.items():
        field, checkpoint = f"teachers.{name}", teacher.checkpoint
        try:
            info = read_model_info(checkpoint)
            check_engine(teacher.engine, checkpoint=checkpoint, capture=False, force=False)
            if isinstance(teacher.engine, SglangConfig) and config.cluster.address is None:
                interpreter(teacher.engine)
            yield from (f"{field}: {problem}" for problem in _quantization_problems(config, checkpoint))
        except (CheckpointError, EngineError) as error:
            yield f"{field}.checkpoint: {error}"
            continue
        except ValueError as error:
            yield from (f"{field}: {line}" for line in f"{error}".splitlines())
            continue
        if (ids := config.distillation.num_ids) >= info.vocab_size:
            yield f"distillation.top_k is {ids}, and {field} has {info.vocab_size} tokens; lower it"
        if difference := _other_tokens(checkpoint, student):
            yield (
                f"{field}.checkpoint is {checkpoint}, whose tokenizer is another one than that of the student, "
                f"{student}: {difference}; use a teacher with the student's tokens"
            )


def _other_tokens(teacher: Path, student: Path) -> str:
    """The first token of the student that has another id in the teacher's tokenizer; empty if there is none."""
    tables: list[dict[str, int]] = []
    for checkpoint in (teacher, student):
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        except Exception as error:  # noqa: BLE001 - the libraries raise many kinds
            return f"that of {checkpoint} cannot be loaded ({describe_error(error).partition('. ')[0]})"
        tables.append(tokenizer.get_vocab())
    theirs, ours = tables
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if (found := theirs.get(token)) != number:
            return f"{token!r} is {number} there, and {'not a token' if found is None else found} here"
    return ""


def _endpoint_problems(task: Task, config: RunConfig) -> Iterator[str]:
    """Why agents cannot reach the endpoints of the rollout workers."""
    if task.program is None:
        return
    if task.program is external and (config.endpoint.run_key is None or not config.endpoint.port):
        yield (
            f"endpoint.run_key is {config.endpoint.run_key and MASK} and endpoint.port is {config.endpoint.port}, and "
            "the agents of the task are outside of the run (agent=external); set both, and give them to the agents"
        )
    if config.endpoint.port and config.rollout.workers > 1:
        yield (
            f"endpoint.port is {config.endpoint.port} with rollout.workers={config.rollout.workers}, which cannot "
            "share it; set rollout.workers=1, or endpoint.port=0"
        )


def _prompts(
    problems: _Problems, task: Task, config: RunConfig
) -> tuple[PromptOrder | None, Mapping[str, Sequence[Prompt]] | None]:
    """The training prompts and the sets of held-out ones; None for those that the task refuses."""
    count = config.validation.prompts

    def checked_order() -> PromptOrder:
        order = prompt_order(task, prompt_file=config.task.prompt_file, seed=config.seed)
        teacher_of(order(0), config.teachers)  # reads and checks the prompts
        return order

    return (
        problems.attempt(checked_order),
        problems.attempt(lambda: held_out_sets(task.validation_prompts(count)) if count else {}),
    )


def _check_start(problems: _Problems, task: Task | None, config: RunConfig) -> None:
    """Check the model that RL starts from; a model that the task builds is written to a temporary folder."""
    if isinstance(config.engine, SglangConfig) and config.cluster.address is None:
        try:
            interpreter(config.engine)
        except EngineError as error:
            problems.found.append(f"engine.name is 'sglang', and there is {error}")
    warm = warm_start_folder(config.warm_start, task=config.task, seed=config.seed, trainer=config.trainer)
    ready = config.model.checkpoint or (warm if warm.is_dir() else None)
    if ready is not None:
        problems.found += [*model_problems(config, ready), *tokenizer_problems(config, ready, task)]
        problems.found += teacher_problems(config, ready)
    elif task is not None:
        with tempfile.TemporaryDirectory() as folder:
            initial = Path(folder) / "initial"
            if problems.attempt(lambda: (task.save_initial_checkpoint(initial), True)):
                found = [*model_problems(config, initial), *tokenizer_problems(config, initial, task)]
                found += teacher_problems(config, initial)
                problems.found += [text.replace(f"{initial}", "the model of the task") for text in found]


def _read_schedule(directory: Path, config: RunConfig) -> RunSchedule:
    """The schedule of another run's directory; ScheduleError if this run cannot follow it."""
    schedule = read_schedule(directory)
    for name, value, wanted in (
        ("rollout.groups_per_batch", config.rollout.groups_per_batch, schedule.batch_groups),
        ("rollout.trajectories_per_group", config.rollout.trajectories_per_group, schedule.trajectories_per_group),
        ("trainer.updates_per_batch", config.trainer.updates_per_batch, schedule.updates_per_batch),
    ):
        if value != wanted:
            raise ScheduleError(f"{name} is {value}, and the schedule is of a run with {wanted}; set that")
    if (steps := config.total_train_steps) > schedule.train_steps:
        raise ScheduleError(
            f"total_train_steps is {steps}, and the schedule has {schedule.train_steps}; set at most that"
        )
    if (bound := config.staleness.max_staleness) < schedule.max_staleness:
        raise ScheduleError(
            f"staleness.max_staleness is {bound}, and the schedule has tokens of {schedule.max_staleness}; "
            "set at least that"
        )
    updates = {g.admitted_update for g in schedule.groups} | {u for g in schedule.groups for s in g.spans for u, _ in s}
    if off := sorted(update for update in updates if update % config.sync.every):
        raise ScheduleError(
            f"sync.every is {config.sync.every}, and the schedule has weights of {off[0]} updates, which it never "
            "publishes"
        )
    return schedule
