"""RunConfig: every value of a run, typed, with the rules that span several of them.

Hydra composes `configs/`; from here on there are only frozen dataclasses, each beside the class it configures. A wrong
value is refused before any process starts, with the field, the value and the way out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_type_hints

import yaml
from annotated_types import Ge
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from agent_loop.engine import SamplingConfig
from agent_loop.loop import TurnLimits
from async_rl.actors import ClusterConfig
from async_rl.batch.advantage import AdvantageConfig
from async_rl.checkpoints import CheckpointConfig
from async_rl.config_rules import problems
from async_rl.data.task import TaskConfig
from async_rl.engines.replica import KeptKV
from async_rl.engines.select import EngineConfig
from async_rl.rollout.rollouter import FailureConfig
from async_rl.rollout.supervisor import SupervisionConfig
from async_rl.train.losses import LossConfig
from async_rl.train.model import TrainerConfig
from async_rl.train.optimizer import OptimizerConfig
from async_rl.validation import explain
from async_rl.warm_start import WarmStartConfig
from async_rl.weights.probe import MismatchConfig
from async_rl.weights.publisher import OnUpdate
from message_queue.journal import JournalConfig
from message_queue.staleness import StalenessConfig
from message_queue.trajectory import ResumeRouting

Config = TypeVar("Config")
ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
RECIPES = ROOT / "recipes"


class ConfigError(ValueError):
    """A run that cannot be started as asked; names field, value and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The initial model."""

    checkpoint: Path | None = None
    """Hugging Face folder; None lets the task build its own model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Rollouts of a run. `groups_per_batch` groups of `trajectories_per_group` trajectories make one batch."""

    groups_per_batch: int
    """Prompt groups in one batch."""
    trajectories_per_group: int
    """Trajectories in one prompt group."""
    workers: int = 1
    """Processes that run agent loops; they share the replicas."""
    on_update: OnUpdate = "resume"
    """Effect of a weight update on generations in flight.

    `resume`: abort, load, resume. `keep`: freeze, load, continue. `drain`: let them finish, then load.
    """
    kv: KeptKV = "recompute"
    """With `on_update=keep`: whether the new weights recompute the K/V of generations in flight."""
    resume_routing: ResumeRouting = "append"
    """Routing rows of a prefix that was forwarded again.

    `append`: the held rows stay. `force`: the same, and the engine uses them. `replace`: the newest rows count.
    `split`: each segment trains under the rows that it saw.
    """
    max_failed_groups: int = 16
    """Number of consecutive failed groups that stops the run."""
    failure: FailureConfig = field(default_factory=FailureConfig)
    """Handling of failed rollouts."""
    sampling: SamplingConfig
    """Sampling parameters."""
    limits: TurnLimits
    """Limits of the turns of a trajectory."""

    def __post_init__(self) -> None:
        for name in ("groups_per_batch", "trajectories_per_group", "workers", "max_failed_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name} is {getattr(self, name)}; must be >= 1")
        if self.kv == "keep" and self.on_update != "keep":
            raise ValueError(
                f"rollout.kv is 'keep' with rollout.on_update={self.on_update}: nothing is in flight whose K/V could "
                "be kept; set rollout.on_update=keep, or rollout.kv=recompute"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Publishing of weights."""

    every: int = 1
    """Train steps per publish, a multiple of trainer.updates_per_batch."""
    transport: Literal["shm", "disk"] = "shm"
    """`shm`: shared memory of one node. `disk`: a shared directory."""
    directory: Path | None = None
    """Shared directory of `disk`."""
    timeout_s: float = 120.0
    """Bound on one publish."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"sync.every is {self.every}; must be >= 1")
        if self.transport == "disk" and self.directory is None:
            raise ValueError("sync.transport is 'disk' and sync.directory is null; give a directory all nodes see")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Validation rounds over held-out prompts."""

    every: int = 10
    """Train steps between rounds; 0 for only before and after training.

    A round starts after the batch that reaches a multiple of `every`.
    """
    prompts: int = 256
    """Number of held-out prompts."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.prompts < 0:
            raise ValueError(f"validation.every={self.every}, validation.prompts={self.prompts}; must be >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """The queue and its process."""

    max_ready: int | None = None
    """Finished groups held before `put` waits; None for as many as the staleness bound allows."""
    timeout_s: float = 60.0
    """Silence in seconds after which the process of the queue counts as dead."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"queue.timeout_s is {self.timeout_s}; must be a positive number of seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run. Paths are absolute: processes, also on other nodes, have different working directories."""

    name: str
    """Name of the run."""
    output_dir: Path
    """Directory of the run."""
    total_train_steps: Annotated[int, Ge(0)]
    """Number of optimizer steps, a multiple of trainer.updates_per_batch."""
    seed: int
    """Seed of the run."""
    resume: Literal["auto", "never"] | Path
    """`auto` continues the run in `output_dir`, `never` refuses to, a path is a checkpoint folder to resume from."""
    schedule: Path | None
    """Run directory whose schedule this run follows; None leaves it free. See `async_rl.rollout.schedule`."""
    model: ModelConfig
    engine: EngineConfig
    trainer: TrainerConfig
    optimizer: OptimizerConfig
    loss: LossConfig
    advantage: AdvantageConfig
    staleness: StalenessConfig
    rollout: RolloutConfig
    sync: SyncConfig
    mismatch: MismatchConfig
    queue: QueueConfig
    journal: JournalConfig
    supervision: SupervisionConfig
    validation: ValidationConfig
    checkpoint: CheckpointConfig
    warm_start: WarmStartConfig
    task: TaskConfig
    cluster: ClusterConfig

    def __post_init__(self) -> None:
        for problem in problems(self):
            raise ValueError(problem)

    @property
    def captures_routing(self) -> bool:
        """Whether the engines return routing rows."""
        return self.trainer.router_replay == "R3"

    @property
    def captures_support(self) -> bool:
        """Whether the engines return the tokens that the sampler kept."""
        return self.rollout.sampling.is_cut

    @property
    def forces_routing(self) -> bool:
        """Whether the engines are made to use rows that they returned before."""
        recomputes = self.rollout.on_update == "keep" and self.rollout.kv == "recompute"
        return self.captures_routing and (self.rollout.resume_routing == "force" or recomputes)

    @property
    def gpus_per_replica(self) -> float:
        """GPUs that Ray reserves for one replica."""
        if (given := self.cluster.gpus_per_replica) is not None:
            return given
        on_gpus = self.engine.device == "cuda" or (self.engine.device == "auto" and self.cluster.gpus_per_rank > 0)
        return float(self.engine.tensor_parallel) if on_gpus else 0.0


def load_config(overrides: Sequence[str], *, config_name: str = "run", config_dir: Path = CONFIGS) -> RunConfig:
    """Compose `config_name` with Hydra overrides and check everything that can be checked without a process.

    Raises:
        ConfigError: one line per problem.
    """
    try:
        with initialize_config_dir(str(config_dir), version_base="1.3"):
            composed = compose(config_name, overrides=list(overrides))
        values = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error
    return build_config(values)


def recipe_overrides(recipe: Path) -> list[str]:
    """Overrides of a `recipe.yaml`.

    Raises:
        ConfigError: no such file, or one without a list of overrides.
    """
    try:
        return [str(override) for override in iter(yaml.safe_load(recipe.read_text())["overrides"])]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"--recipe: {recipe} is not a recipe with a list `overrides` ({error!r})") from error


def build_config(values: Mapping[str, Any]) -> RunConfig:
    """Typed RunConfig from plain values.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, or an impossible combination.
    """
    unknown = list(_unknown_keys(RunConfig, values))
    if unknown:
        raise ConfigError(f"unknown config key: {', '.join(unknown)}")
    try:
        return _with_absolute_paths(TypeAdapter(RunConfig).validate_python(_without_empty_schedules(values)))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(e) for e in error.errors())) from error


def _without_empty_schedules(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, in which a schedule over the updates of a phase without updates is constant: no update asks it."""
    found = dict(values)
    if found.get("total_train_steps") == 0:
        found["optimizer"] = _constant(found.get("optimizer"))
    warm = cast(Any, found.get("warm_start"))
    if isinstance(warm, Mapping) and cast(Mapping[str, Any], warm).get("steps") == 0:
        found["warm_start"] = {**warm, "optimizer": _constant(cast(Mapping[str, Any], warm).get("optimizer"))}
    return found


def _constant(optimizer: Any) -> Any:
    """The optimizer with a constant schedule if its own has no updates to decay over."""
    if not isinstance(optimizer, Mapping) or cast(Mapping[str, Any], optimizer).get("decay_steps") != 0:
        return optimizer
    return {**cast(Mapping[str, Any], optimizer), "decay": "constant"}


def _with_absolute_paths(config: Config) -> Config:
    """The config with each path, at any depth, resolved against the working directory of this process."""
    changed: dict[str, Any] = {}
    for name in (f.name for f in fields(cast(Any, config))):
        value = getattr(config, name)
        if isinstance(value, Path):
            changed[name] = value.expanduser().absolute()
        elif is_dataclass(value):
            changed[name] = _with_absolute_paths(value)
    return replace(cast(Any, config), **changed)


def _unknown_keys(kind: type[Any], values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Keys that no field takes, dotted."""
    hints = get_type_hints(kind)
    known = {f.name for f in fields(kind)}
    for key, value in values.items():
        if key not in known:
            yield f"{prefix}{key}"
        elif isinstance(value, Mapping):
            within = cast(Mapping[str, Any], value)
            for member in _config_classes(hints[key], within):
                yield from _unknown_keys(member, within, f"{prefix}{key}.")


def _config_classes(hint: Any, values: Mapping[str, Any]) -> list[type[Any]]:
    """The config class that `values` are of; of several, the one whose name they carry."""
    members = [m for m in get_args(hint) or (hint,) if is_dataclass(m)]
    if len(members) > 1:
        members = [m for m in members if cast(Any, m).__dataclass_fields__["name"].default == values.get("name")]
    return cast(list[type[Any]], members)


def _one_line(error: Exception) -> str:
    """Hydra's first line, and its hint on how to add a key left out: unknown keys are refused here."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is missing; give it a value"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [
        line for line in lines if not line.startswith(("To append", "Set the environment", "full_key", "object_type"))
    ]
    return " ".join(kept) or repr(error)
