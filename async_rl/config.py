"""RunConfig: every value of a run, typed, with the rules that span several values.

Defaults are in frozen dataclasses, each next to the class that it configures. Hydra composes the presets of `configs/`
(only differences from the defaults) with the overrides of the command line. A wrong value is refused before any
process starts, with the field, the value and the way out. Importing this module does not import torch or megatron.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field, fields
from difflib import get_close_matches
from pathlib import Path
from statistics import median_low
from typing import Annotated, Any, Literal, cast

import yaml
from annotated_types import Ge, Gt
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import Field as PydanticField
from pydantic import TypeAdapter, ValidationError

from agent_loop.bounds import Count, Seconds, bounded
from agent_loop.engine import SamplingConfig
from agent_loop.loop import TurnLimits
from agent_loop.programs.endpoint.config import EndpointConfig
from async_rl.files.command import prog
from async_rl.files.config_classes import unknown_keys, with_absolute_paths, with_defaults
from async_rl.files.masking import MASK, hidden, masked
from async_rl.files.rollouts import RecordConfig
from async_rl.files.validation import explain
from async_rl.inference.gate import KVPolicy
from async_rl.inference.publisher import OnUpdate, SyncMode
from async_rl.inference.select import EngineConfig, ReplicaSettings, own_variables
from async_rl.inference.sglang.config import MAX_KEPT, SglangConfig
from async_rl.inference.supervisor import SupervisionConfig
from async_rl.inference.vllm.config import VllmConfig
from async_rl.metrics.trackers import TrackingConfig
from async_rl.rollout.rollouter import FailureConfig
from async_rl.rollout.task import TaskConfig
from async_rl.rollout.teachers import TeacherConfig
from async_rl.trainer.batch.baselines import GRPO, AdvantageConfig
from async_rl.trainer.critic.config import CriticConfig
from async_rl.trainer.critic.gae import GAE
from async_rl.trainer.loss.distillation import DistillationConfig
from async_rl.trainer.loss.losses import LossConfig
from async_rl.trainer.model.model import TrainerConfig, rank_environment
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.model_settings import RESOLVERS, local_checkpoint
from async_rl.weights.transport import Backend
from message_queue.errors import AsyncRLError
from message_queue.journal import JournalConfig
from message_queue.policies import StalenessConfig
from message_queue.trajectory import ResumeRouting

_PACKAGE = Path(__file__).resolve().parent
_FILES = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent  # an installed wheel or a checkout
CONFIGS, RECIPES = _FILES / "configs", _FILES / "recipes"
SYNCHRONOUS, MAX_STALENESS = "staleness=synchronous", "staleness.max_staleness="
"""An override that fixes the bound on staleness, and the start of those that set it."""
GROUP_SIZES = ("rollout.groups_per_batch=", "rollout.trajectories_per_group=")
"""Starts of the overrides that a preset of `configs/algorithm` has too."""
SHARED_BY_TEACHERS = ("name", "device", "dtype")
"""Fields of `engine` that the engine of a teacher has too if it does not give them."""
_FIELD = re.compile(r"(?!hydra\b)\w+(\.\w+)*")  # name of a field in an override


FLOAT32_MAX_K3 = 1e-7
"""20 times the k3 of 5e-6 that is expected with TF32: its rounding error is 8 times smaller than with bfloat16, and k3
grows with the square of the error. Float32 has a k3 of about 1e-12."""
HALF_LEAST_K3, HALF_MAX_K3, HALF_NOISE = 1e-3, 1e-2, 10
"""For bfloat16 and float16: HALF_NOISE times the median of the first probes, between these two. The models of
benchmarks/equal_weights.py have at most 3.4e-4 over the same experts."""
Url = Annotated[str, PydanticField(pattern="^[a-z0-9+:]+://.")]
EnvironmentValue = Annotated[str, PydanticField(coerce_numbers_to_str=True)]


class ConfigError(AsyncRLError, ValueError):
    """A run that cannot be started as asked; names field, value and the way out."""


@bounded("model")
class ModelConfig:
    """The initial model."""

    checkpoint: Path | None = None
    """Hugging Face folder, or name of a model at the hub, as in Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION; None lets
    the task build its own model."""
    cache: Path = Path("outputs/dequantized")
    """Folder of plain bfloat16 copies of quantized checkpoints, for reuse by later runs; every node must see it."""


@bounded("rollout")
class RolloutConfig:
    """Rollouts of a run. `groups_per_batch` groups of `trajectories_per_group` trajectories make one batch."""

    groups_per_batch: Count
    """Prompt groups in one batch."""
    trajectories_per_group: Count
    """Trajectories in one prompt group."""
    workers: Count = 1
    """Processes that run agent loops; they share the replicas."""
    on_update: OnUpdate = "resume"
    """Effect of a weight update on generations in flight.

    `resume`: abort, load, resume. `keep`: freeze, load, continue. `drain`: let them finish, then load.
    """
    kv: KVPolicy = "recompute"
    """With `on_update=keep`: whether the new weights recompute the K/V of generations in flight."""
    resume_routing: ResumeRouting = "append"
    """Routing rows of a prefix that was forwarded again.

    `append`: the held rows stay. `force`: the same, and the engine uses them. `replace`: the newest rows count.
    `split`: each segment trains under the rows that it saw.
    """
    max_failed_groups: Count = 16
    """Number of consecutive failed groups that stops the run."""
    drop_without_spread: Annotated[int, Ge(0)] = 0
    """Groups in a row that are dropped because all their rewards are equal; groups of the next prompts take their
    places. One more is trained, so that a run continues if no group has a spread. 0 drops none."""
    failure: FailureConfig = field(default_factory=FailureConfig)
    """Handling of failed rollouts."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling parameters."""
    limits: TurnLimits
    """Limits of the turns of a trajectory."""
    record: RecordConfig = field(default_factory=RecordConfig)
    """Rollouts that the run keeps on disk."""

    def __post_init__(self) -> None:
        if self.sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature is 0: the rollouts of a group would be equal, and untrained; use 1, or "
                "validation.sampling.temperature=0 for greedy validation only"
            )
        if self.kv == "keep" and self.on_update != "keep":
            raise ValueError(
                f"rollout.kv is 'keep' with rollout.on_update={self.on_update}: nothing is in flight whose K/V could "
                "be kept; set rollout.on_update=keep, or rollout.kv=recompute"
            )


@bounded("sync")
class SyncConfig:
    """Publishing of weights."""

    every: Count = 1
    """Train steps per publish, a multiple of trainer.updates_per_batch."""
    route: Literal["memory", "broadcast", "folder", "direct"] = "memory"
    """`memory`: shared memory of one node. `broadcast`: from the shared memory of the trainer's nodes to that of the
    nodes of replicas. `folder`: a directory that all nodes see, or an object store. With these two, one
    replica of a node brings a version into the node's shared memory, and all replicas of the node read it there.
    `direct`: from copies in the memory of the trainer ranks to the ranks of each engine, during its load, without
    files."""
    directory: Path | Url | None = None
    """Directory of `folder`, or URL of one in an object store that fsspec has a driver for, such as
    s3://bucket/prefix."""
    backend: Backend = "gloo"
    """With `broadcast` or `direct`: `gloo` sends over TCP, `nccl` between GPUs. NCCL needs a GPU in each trainer rank
    and in each replica, and memory of one bucket there, or of two in each rank of an engine with `direct`."""
    delta: bool = False
    """With `folder`: write the changes against the version before, except for each 16th version. Lossless; a tensor
    is complete if more than a third changed. Each trainer rank keeps a copy of the weights that it writes."""
    mode: SyncMode = "at_once"
    """`at_once`: all replicas load at the same time, and no tool starts meanwhile. `rolling`: at most `max_paused`
    replicas are paused at a time, the others serve, and tools start. `staged`: as `at_once`, but the replicas load
    next to the weights that serve, with twice their memory, and are paused for the exchange only."""
    max_paused: Count = 1
    """With `rolling`: most replicas that are paused at a time."""
    timeout_s: float = 120.0
    """Bound in seconds on one publish of a replica, from pause to resume (with `drain`, the longest generation), and on
    the regular check that a replica answers."""

    def __post_init__(self) -> None:
        if self.route == "folder" and self.directory is None:
            raise ValueError(
                "sync.route is 'folder' and sync.directory is null; give a directory all nodes see, or a URL"
            )


@bounded("validation")
class ValidationConfig:
    """Validation rounds over held-out prompts."""

    every: Annotated[int, Ge(0)] = 10
    """Train steps between rounds; 0 for only before and after training.

    A round starts after the batch that reaches a multiple of `every`.
    """
    prompts: Annotated[int, Ge(0)] = 256
    """Number of held-out prompts; of each set if the task has several."""
    samples: Count = 1
    """Rollouts of each held-out prompt; with more than one, a round also has pass@k."""
    sampling: SamplingConfig | None = None
    """Sampling parameters; None is `rollout.sampling`."""


@bounded("queue")
class QueueConfig:
    """The queue and its process."""

    max_ready: int | None = None
    """Finished groups held before `put` waits; None for as many as the staleness bound allows."""
    timeout_s: Seconds = 60.0
    """Silence in seconds after which the process of the queue counts as dead."""


@bounded("mismatch")
class MismatchConfig:
    """Comparison of engines and trainer at equal weights."""

    verify: Literal["probe", "every_token"] = "probe"
    """`probe`: after a publish each replica decodes `prompts`, which the trainer scores. `every_token`: before it
    trains a batch, the trainer scores every token with the weights of the version that sampled it, as also
    `loss.ratio=separated` does; this costs about a forward pass of the batch."""
    max_k3: float | Literal["auto"] | None = "auto"
    """Largest accepted `mismatch/k3_probe` or `old/k3_largest` in nat; a larger value stops the run. `auto` is 1e-7 in
    float32, else ten times the median of the first five values since the start, at least 1e-3 and at most 1e-2; null
    only reports."""
    prompts: Annotated[int, Ge(0)] = 4
    """Sequences that each replica decodes; 0 disables the comparison."""
    tokens: Count = 16
    """Sampled tokens per sequence."""

    def __post_init__(self) -> None:
        if isinstance(self.max_k3, float | int) and not self.max_k3 > 0:
            raise ValueError(f"mismatch.max_k3 is {self.max_k3}; must be > 0, auto, or null to only report")

    def bound(self, *, dtypes: Sequence[str], noise: Sequence[float]) -> float:
        """Largest accepted k3; infinite if there is no bound.

        Noise (2e-4, 6e-4, 3e-4) in bfloat16 gives 3e-3, and no noise gives 1e-2.

        Args:
            dtypes: dtypes of engine and trainer.
            noise: accepted k3 of the first comparisons.
        """
        if self.max_k3 != "auto":
            return math.inf if self.max_k3 is None else self.max_k3
        if set(dtypes) == {"float32"}:
            return FLOAT32_MAX_K3
        return min(HALF_MAX_K3, max(HALF_LEAST_K3, HALF_NOISE * median_low(noise))) if noise else HALF_MAX_K3


@bounded("checkpoint")
class CheckpointConfig:
    """Schedule and number of checkpoints."""

    every: Annotated[int, Ge(0)] = 0
    """Train steps between checkpoints; 0 for only at the end or on a stop.

    A checkpoint is taken after the batch that reaches a multiple of `every`.
    """
    keep: Count = 2
    """Number of checkpoints kept on disk."""


@bounded("warm_start")
class WarmStartConfig:
    """Supervised training of the task's own model on demonstrations, before RL."""

    steps: Annotated[int, Ge(0)]
    """Supervised steps; 0 skips the warm start."""
    batch: Count
    """Demonstrations in one step."""
    optimizer: OptimizerConfig
    """AdamW and its schedule over these steps."""
    cache: Path
    """Folder of finished warm starts, for reuse by later runs."""


@bounded("cluster")
class ClusterConfig:
    """The Ray cluster, and the resources and time bounds of its actors."""

    address: str | None = None
    """Address of a running Ray cluster; None starts one on this machine."""
    num_cpus: Count = 16
    """Logical CPUs of a started cluster; may exceed the cores, because it only counts actors."""
    object_store_bytes: Count = 256 << 20
    """Shared memory of a started cluster."""
    cpus_per_rank: Annotated[float, Ge(0)] = 1.0
    """CPUs of one trainer rank."""
    gpus_per_rank: Annotated[float, Ge(0)] = 0.0
    """GPUs of one trainer rank."""
    cpus_per_replica: Annotated[float, Ge(0)] = 1.0
    """CPUs of one engine replica, on all its nodes together."""
    gpus_per_replica: Annotated[float, Ge(0)] | None = None
    """GPUs of one engine replica, on all its nodes together.

    None is engine.tensor_parallel x engine.data_parallel if engines are on GPUs, else 0. They are with
    engine.device=cuda, and with engine.device=auto if gpus_per_rank > 0.
    """
    rank_env: Mapping[str, EnvironmentValue] = field(default_factory=dict[str, str])
    """Environment variables of the processes of trainer ranks."""
    replica_env: Mapping[str, EnvironmentValue] = field(default_factory=dict[str, str])
    """Environment variables of the processes of replicas and their engines."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD."""
    start_timeout_s: Annotated[float, Gt(0)] = 300.0
    """Bound on placing and starting all actors."""
    call_timeout_s: Annotated[float, Gt(0)] = 600.0
    """Bound on one call of a trainer or rollout worker."""
    stop_timeout_s: Annotated[float, Gt(0)] = 20.0
    """Bound on ending the rollouts of a worker, and on closing one actor."""


@bounded()
class RunConfig:
    """One run. Paths are absolute: processes, also on other nodes, have different working directories."""

    name: str
    """Name of the run."""
    output_dir: Path
    """Directory of the run."""
    total_train_steps: Annotated[int, Ge(0)]
    """Number of optimizer steps, a multiple of trainer.updates_per_batch."""
    seed: int = 0
    """Seed of the run."""
    resume: Literal["auto", "never"] | Path = "auto"
    """`auto` continues the run in `output_dir`, `never` refuses to, a path is a checkpoint folder to resume from."""
    schedule: Path | None = None
    """Run directory whose schedule this run follows; None leaves it free. See `async_rl.rollout.schedule`."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The initial model."""
    engine: EngineConfig
    """Inference engine and its replicas."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Trainer ranks."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule over `total_train_steps`."""
    loss: LossConfig
    """Policy loss."""
    advantage: AdvantageConfig = field(default_factory=GRPO)
    """Advantages from rewards."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Value model of advantage.name=gae."""
    teachers: Mapping[str, TeacherConfig] = field(default_factory=dict[str, TeacherConfig])
    """Name -> frozen model that scores the sampled tokens, for on-policy distillation; empty for none. A task names the
    teacher of a prompt if there are several."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """The term of the teachers in the loss."""
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    """Bound on staleness, and what happens to groups that would exceed it."""
    rollout: RolloutConfig
    """Rollouts."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """Publishing of weights."""
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    """Comparison of engines and trainer at equal weights."""
    queue: QueueConfig = field(default_factory=QueueConfig)
    """The queue and its process."""
    journal: JournalConfig = field(default_factory=JournalConfig)
    """Durability of the queue."""
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    """Bounds on restarts."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Validation rounds."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Experiment trackers."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    warm_start: WarmStartConfig
    """Supervised training before RL."""
    task: TaskConfig
    """Prompts, agent loop and reward."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Ray and its actors."""
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    """HTTP endpoint of each rollout worker, for agent programs."""

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ValueError("\n".join(problems))

    @property
    def captures_routing(self) -> bool:
        """Whether the engines return routing rows."""
        return self.trainer.router_replay == "R3"

    @property
    def has_critic(self) -> bool:
        """Whether the trainer has a value model."""
        return isinstance(self.advantage, GAE)

    @property
    def walks_versions(self) -> bool:
        """Whether the trainer scores tokens with the weights of the versions that sampled them."""
        return self.mismatch.verify == "every_token" or self.loss.needs_old_policy

    @property
    def captures_support(self) -> bool:
        """Whether the engines return the tokens that the sampler kept."""
        return self.rollout.sampling.is_cut or self.validation_sampling.is_cut

    @property
    def validation_sampling(self) -> SamplingConfig:
        """Sampling parameters of held-out prompts."""
        return self.validation.sampling or self.rollout.sampling

    @property
    def forces_routing(self) -> bool:
        """Whether the engines are made to use rows that they returned before."""
        recomputes = self.rollout.on_update == "keep" and self.rollout.kv == "recompute"
        return self.captures_routing and (self.rollout.resume_routing == "force" or recomputes)

    @property
    def gpus_per_replica(self) -> float:
        """GPUs that Ray reserves for one replica."""
        return self._gpus_of(self.engine)

    @property
    def gpus_of_teachers(self) -> list[tuple[str, float]]:
        """Teacher and the GPUs that Ray reserves for it, for each replica of the teachers."""
        return [
            (name, self._gpus_of(teacher.engine))
            for name, teacher in self.teachers.items()
            for _ in range(teacher.engine.replicas)
        ]

    @property
    def replica_settings(self) -> ReplicaSettings:
        """What the process of a replica needs to know."""
        return ReplicaSettings(
            engine=self.engine,
            captures_routing=self.captures_routing,
            forces_routing=self.forces_routing,
            captures_support=self.captures_support,
            environment=self.cluster.replica_env,
        )

    def teacher_settings(self, name: str) -> ReplicaSettings:
        """What the process of a teacher's replica needs to know."""
        return ReplicaSettings(engine=self.teachers[name].engine, environment=self.cluster.replica_env)

    @property
    def teaches(self) -> DistillationConfig | None:
        """The term of the teachers; None without any."""
        return self.distillation if self.teachers else None

    def _gpus_of(self, engine: EngineConfig) -> float:
        if (given := self.cluster.gpus_per_replica) is not None:
            return given
        return float(engine.ranks) if engine.device == "cuda" else 0.0


def load_config(overrides: Sequence[str], *, config_name: str = "run", config_dir: Path = CONFIGS) -> RunConfig:
    """Compose `config_name` with Hydra overrides and check everything that can be checked without a process.

    Raises:
        ConfigError: one line per problem.
    """
    return build_config(composed_values(overrides, config_name=config_name, config_dir=config_dir))


def composed_values(
    overrides: Sequence[str], *, config_name: str = "run", config_dir: Path = CONFIGS
) -> dict[str, Any]:
    """Plain values for `build_config` to check: `config_name` with Hydra overrides.

    An override `a.b=value` may name any field, whether or not a preset does. A field without a value has its default
    before interpolations are resolved, so that `${a.b}` may name any field too.

    Raises:
        ConfigError: an override that cannot be read, or a value that is missing.
    """
    config_dir = config_dir.absolute()
    try:
        _check_overrides(overrides, config_dir)
        overrides = [*_model_choice(overrides, config_dir), *overrides]
        for name, function in RESOLVERS.items():
            OmegaConf.register_new_resolver(name, function, replace=True)
        with initialize_config_dir(str(config_dir), version_base="1.3"):
            composed = compose(config_name, overrides=[_forced(word, config_dir) for word in overrides])
        given = cast(dict[str, Any], OmegaConf.to_container(composed))
        if isinstance(checkpoint := given.get("model", {}).get("checkpoint"), str):
            given["model"]["checkpoint"] = _local(checkpoint)
        given = _with_teacher_engines(given)
        for teacher in (given.get("teachers") or {}).values():
            if isinstance(teacher, dict) and isinstance(checkpoint := teacher.get("checkpoint"), str):
                teacher["checkpoint"] = _local(checkpoint)
        whole = OmegaConf.create(with_defaults(RunConfig, given))
        return cast(dict[str, Any], OmegaConf.to_container(whole, resolve=True, throw_on_missing=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _model_choice(overrides: Sequence[str], config_dir: Path) -> list[str]:
    """The preset for checkpoints if `overrides` give one and choose no preset of the model themselves."""
    is_chosen = any(word.startswith("model=") for word in overrides) or not _has_checkpoint(overrides)
    has_preset = (config_dir / "model" / "hugging_face.yaml").is_file()
    return ["model=hugging_face"] if has_preset and not is_chosen else []


def _has_checkpoint(overrides: Sequence[str]) -> bool:
    given = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("model.checkpoint=")]
    return bool(given) and given[-1] != "null"


def _local(checkpoint: str) -> str:
    """A checkpoint's folder; a missing value and an interpolation stay as they are."""
    if checkpoint.startswith("${") or checkpoint == "???":
        return checkpoint
    try:
        return str(local_checkpoint(checkpoint))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def plain_values(config: RunConfig) -> dict[str, Any]:
    """All values of a config with the types of YAML, to show or to store: paths are text, secrets are masked."""
    return masked(json.loads(json.dumps(asdict(config), default=str)))


def recipe_overrides(recipe: Path, overrides: Sequence[str] = ()) -> list[str]:
    """Overrides of a `recipe.yaml`, with its list `tiny_model` if no checkpoint is given.

    Args:
        overrides: given next to the recipe. With `staleness=synchronous` the recipe's own bound is left out, and with
            `algorithm=NAME` its sizes of groups and batches, because an algorithm has its own.

    Raises:
        ConfigError: no such file, or one without a list of overrides.
    """
    try:
        found = yaml.safe_load(recipe.read_text())
        own = [*found["overrides"], *(() if _has_checkpoint(overrides) else found.get("tiny_model", ()))]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--recipe: {recipe} is not a recipe with a list `overrides` ({error!r}); use one of "
            f"{', '.join(sorted(path.parent.name for path in RECIPES.glob('*/recipe.yaml')))}"
        ) from error
    left_out = (MAX_STALENESS,) if SYNCHRONOUS in overrides else ()
    if any(word.startswith("algorithm=") for word in overrides):
        left_out = (*left_out, *GROUP_SIZES)
    return [str(each) for each in own if not str(each).startswith(left_out)]


def build_config(values: Mapping[str, Any]) -> RunConfig:
    """Typed RunConfig from plain values.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, or an impossible combination.
    """
    values = _with_derived(values)
    try:
        unknown = list(unknown_keys(RunConfig, values))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if unknown:
        raise ConfigError(f"unknown config key: {', '.join(unknown)}")
    if lacking := list(hidden(values)):
        raise ConfigError(
            f"{', '.join(lacking)}: {MASK} stands for a value that records of runs do not hold; give the value, as in "
            f"{lacking[0]}='${{oc.env:VARIABLE}}'"
        )
    try:
        return with_absolute_paths(TypeAdapter(RunConfig).validate_python(values))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(e, values=values) for e in error.errors())) from error


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    return dict(cast(Mapping[str, Any], section)) if isinstance(section, Mapping) else {}


def _sections(values: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """The sections of a mapping of them; only those that are sections."""
    section: Mapping[str, Any] = values.get(name) or {}
    return {key: dict(each) for key, each in section.items() if isinstance(each, dict)}


def _with_teacher_engines(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, where the engine of a teacher has what it does not give: the fields SHARED_BY_TEACHERS of `engine`, and
    the length of the longest rollout and one token more."""
    engine, teachers = _section(values, "engine"), _sections(values, "teachers")
    shared = {key: engine[key] for key in SHARED_BY_TEACHERS if key in engine}
    shared["max_model_len"] = "${teacher_length:${engine.max_model_len},${rollout.limits.max_tokens}}"
    made = {name: {**each, "engine": shared | _section(each, "engine")} for name, each in teachers.items()}
    return {**values, **({"teachers": {**values["teachers"], **made}} if teachers else {})}


def _with_derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, in which engines whose device is `auto` are on a GPU if one is reserved for them.

    A schedule over the updates of a phase without updates is constant: no update asks it.
    """
    found, warm = dict(values), _section(values, "warm_start")
    for phase, updates in ((found, found.get("total_train_steps")), (warm, warm.get("steps"))):
        optimizer = _section(phase, "optimizer")
        if updates == 0 and optimizer.get("decay_steps") == 0:
            phase["optimizer"] = optimizer | {"decay": "constant"}
    engine, cluster = _section(found, "engine"), _section(found, "cluster")
    gpus = cluster.get("gpus_per_rank"), cluster.get("gpus_per_replica")
    if engine.get("device", "auto") == "auto" and all(isinstance(number, int | float | None) for number in gpus):
        reserved = gpus[0] or 0 if gpus[1] is None else gpus[1]
        engine["device"] = "cuda" if reserved > 0 else "cpu"
    for teacher in (teachers := _sections(found, "teachers")).values():
        teacher["engine"] = of_teacher = _section(teacher, "engine")
        if of_teacher.get("device", "auto") == "auto":
            of_teacher["device"] = engine.get("device", "auto")
    found |= {"teachers": {**found["teachers"], **teachers}} if teachers else {}
    return found | {name: made for name, made in (("engine", engine), ("warm_start", warm)) if name in found}


def preset_names(folder: Path) -> list[str]:
    """Names of the presets in a folder of configs."""
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _check_overrides(overrides: Sequence[str], config_dir: Path) -> None:
    """Refuse presets that do not exist, and several values for one key."""
    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"{word!r} is not an override; write key=value")
        try:
            parsed = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise ConfigError(
                f"{word!r} is not an override: {_one_line(error)}; quote the value, 'key=\"value\"'"
            ) from error
        name, _, value = word.partition("=")
        if parsed.is_sweep_override():
            values = value.split(",") if isinstance(parsed.value(), ChoiceSweep) and "(" not in value else ["..."]
            raise ConfigError(
                f"{word} has several values, and a run has one of each; start a run for each value: for value in "
                f"{' '.join(values)}; do {prog('run')} {name}=$value name=run-$value; done"
            )
        if word.startswith(MAX_STALENESS) and SYNCHRONOUS in overrides and value != "0":
            raise ConfigError(
                f"{word} with {SYNCHRONOUS}, where each batch is sampled by the weights that it trains; leave "
                "out one of them, or use staleness=wait"
            )
        folder = config_dir / name
        if _FIELD.fullmatch(name) and folder.is_dir() and value not in (known := [*preset_names(folder), "null"]):
            similar = get_close_matches(value, known, n=1)
            hint = f"did you mean {name}={similar[0]}? " if similar else ""
            raise ConfigError(f"{name} is {value!r}, which is no preset; {hint}use one of {', '.join(known[:-1])}")


def _forced(override: str, config_dir: Path) -> str:
    """`seed=4` -> `++seed=4`, which needs no preset that names the field; choices of presets and `+` stay."""
    name, is_set, _ = override.partition("=")
    return f"++{override}" if is_set and _FIELD.fullmatch(name) and not (config_dir / name).is_dir() else override


def _one_line(error: Exception) -> str:
    """Hydra's first line, and its hint on how to add a key left out: unknown keys are refused here."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is missing; give it a value"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [
        line for line in lines if not line.startswith(("To append", "Set the environment", "full_key", "object_type"))
    ]
    where = f"{error.full_key}: " if isinstance(error, OmegaConfBaseException) and error.full_key else ""
    return f"{where}{' '.join(kept) or repr(error)}"


# ---- rules over several fields; each names the fields, their values and the fix


def _problems(config: RunConfig) -> Iterator[str]:
    """Problems of a config; empty if the run can be started."""
    yield from _rollout_problems(config)
    yield from _schedule_problems(config)
    yield from _trainer_problems(config)
    yield from _critic_problems(config)
    yield from _cluster_problems(config)
    yield from _teacher_problems(config)
    yield from _unused_options(config)
    if isinstance(config.resume, Path) and not (config.resume / "run.json").is_file():
        yield f"resume is {config.resume}, which is no checkpoint folder; use auto, never or checkpoints/step-NNNNNN"


def _rollout_problems(config: RunConfig) -> Iterator[str]:
    """What is rolled out, and when."""
    rollout, every, per_batch = config.rollout, config.sync.every, config.trainer.updates_per_batch
    if every % per_batch:
        yield (
            f"sync.every is {every} with trainer.updates_per_batch={per_batch}: weights are published between batches, "
            f"each of {per_batch} optimizer steps; set sync.every to a multiple of it"
        )
    elif config.staleness.max_staleness < every - 1:
        yield (
            f"staleness.max_staleness is {config.staleness.max_staleness} with sync.every={every} and "
            f"trainer.updates_per_batch={per_batch}: at the last optimizer step of a batch its weights are up to "
            f"{every - 1} steps old before any wait; raise the bound to at least that (to {every + per_batch - 1} so "
            "that rollouts run one batch ahead), publish more often, or make fewer updates per batch"
        )
    if config.optimizer.warmup_steps >= config.total_train_steps > 0:
        yield (
            f"optimizer.warmup_steps is {config.optimizer.warmup_steps} with total_train_steps="
            f"{config.total_train_steps}: the learning rate would never reach optimizer.lr; lower the one or raise the "
            "other"
        )
    if config.total_train_steps % per_batch:
        yield (
            f"total_train_steps is {config.total_train_steps} with trainer.updates_per_batch={per_batch}; train steps "
            f"are optimizer steps, and each batch makes {per_batch} of them: set a multiple of it"
        )
    if rollout.groups_per_batch % per_batch:
        yield (
            f"rollout.groups_per_batch is {rollout.groups_per_batch} with trainer.updates_per_batch={per_batch}; a "
            "batch is split into as many mini-batches of equal size by its groups: set a multiple of it"
        )
    advantage, taught = config.advantage, config.teachers and not config.distillation.rewards
    if rollout.trajectories_per_group == 1 and advantage.compares == "group" and not taught:
        yield (
            f"rollout.trajectories_per_group is 1 with advantage.name={advantage.name}, which compares the "
            "trajectories of a group, so nothing would be trained; use more, or advantage.name=batch_mean, spo, gae, "
            "contrastive or reinforce_plus_plus"
        )
    if rollout.drop_without_spread and advantage.compares == "batch":
        yield (
            f"rollout.drop_without_spread is {rollout.drop_without_spread} with advantage.name={advantage.name}, "
            "which compares the trajectories of a batch, so groups without spread are trained too; set it to 0"
        )
    if rollout.failure.on_failed == "fill" and rollout.failure.max_fills > rollout.trajectories_per_group:
        yield (
            f"rollout.failure.max_fills is {rollout.failure.max_fills} with rollout.trajectories_per_group="
            f"{rollout.trajectories_per_group}; a group makes up for each of its rollouts once at most: lower it"
        )
    if rollout.limits.max_tokens > config.engine.max_model_len:
        yield (
            f"rollout.limits.max_tokens is {rollout.limits.max_tokens}, more than "
            f"engine.max_model_len={config.engine.max_model_len}; lower the one or raise the other"
        )
    per_turn = rollout.limits.max_new_tokens_per_turn
    if per_turn is not None and per_turn >= rollout.limits.max_tokens:
        yield (
            f"rollout.limits.max_new_tokens_per_turn is {per_turn} with rollout.limits.max_tokens="
            f"{rollout.limits.max_tokens}, which also counts the prompt, so it bounds nothing; lower it, or raise "
            "rollout.limits.max_tokens"
        )


def _schedule_problems(config: RunConfig) -> Iterator[str]:
    """What a run that keeps to a schedule cannot do."""
    rollout = config.rollout
    if config.schedule is None:
        return
    if rollout.workers > 1:
        yield (
            f"rollout.workers is {rollout.workers} with a schedule, to which only rollouts in the process of the "
            "driver keep; set rollout.workers=1"
        )
    trains_all = f"with schedule={config.schedule}; a run that keeps to a schedule trains all of it"
    if rollout.drop_without_spread:
        yield f"rollout.drop_without_spread is {rollout.drop_without_spread} {trains_all}: set it to 0"
    if config.staleness.policy != "wait":
        yield f"staleness.policy is {config.staleness.policy!r} {trains_all}: use staleness=wait"


def _trainer_problems(config: RunConfig) -> Iterator[str]:
    """What is trained, and what training needs of a rollout."""
    rollout, trainer = config.rollout, config.trainer
    trajectories = rollout.groups_per_batch * rollout.trajectories_per_group // trainer.updates_per_batch
    if trajectories % trainer.data_parallel:
        yield (
            f"a mini-batch has {trajectories} trajectories (rollout.groups_per_batch={rollout.groups_per_batch} x "
            f"rollout.trajectories_per_group={rollout.trajectories_per_group} / trainer.updates_per_batch="
            f"{trainer.updates_per_batch}), which do not divide over {trainer.data_parallel} data-parallel ranks; "
            "change one of them"
        )
    if rollout.failure.on_failed == "rest" and trainer.data_parallel > 1:
        yield (
            f"rollout.failure.on_failed is 'rest' with {trainer.data_parallel} data-parallel ranks, over which "
            "a batch with failed rollouts does not divide; use rollout.failure.on_failed=fill or drop"
        )
    for path, sampling in (("rollout", rollout.sampling), ("validation", config.validation_sampling)):
        if isinstance(config.engine, SglangConfig) and sampling.top_k >= MAX_KEPT:
            yield (
                f"{path}.sampling.top_k is {sampling.top_k} with engine.name=sglang, which returns fewer than "
                f"{MAX_KEPT} kept tokens; lower it, set it to -1, or use engine=vllm"
            )
    if trainer.lora.rank and config.optimizer.cpu_offload:
        yield (
            f"optimizer.cpu_offload is {config.optimizer.cpu_offload} with trainer.lora.rank={trainer.lora.rank}: the "
            "optimizer state of adapters is too small to be worth moving; set optimizer.cpu_offload=0"
        )
    if trainer.router_replay != "R3" and rollout.resume_routing != "append":
        yield (
            f"rollout.resume_routing is {rollout.resume_routing!r} with trainer.router_replay="
            f"{trainer.router_replay}; rows are only captured for R3, so set trainer.router_replay=R3, or "
            "rollout.resume_routing=append"
        )


def _critic_problems(config: RunConfig) -> Iterator[str]:
    """What the value model is for."""
    critic, schedule = config.critic, config.critic.optimizer
    if not config.has_critic:
        if changed := [f.name for f in fields(critic) if getattr(critic, f.name) != getattr(CriticConfig(), f.name)]:
            yield (
                f"critic.{changed[0]} is {getattr(critic, changed[0])}, which does nothing with advantage.name="
                f"{config.advantage.name}; set advantage.name=gae, or leave it at its default"
            )
        return
    if critic.checkpoint is not None and not (critic.checkpoint / "config.json").is_file():
        yield (
            f"critic.checkpoint is {critic.checkpoint}, which is no Hugging Face folder with a config.json; give one, "
            "or null for the weights of the policy"
        )
    if critic.warmup_steps >= config.total_train_steps > 0:
        yield (
            f"critic.warmup_steps is {critic.warmup_steps} with total_train_steps={config.total_train_steps}: the "
            "policy would never be trained; lower the one or raise the other"
        )
    if schedule.warmup_steps >= config.total_train_steps * critic.updates > 0:
        yield (
            f"critic.optimizer.warmup_steps is {schedule.warmup_steps} with total_train_steps="
            f"{config.total_train_steps} and critic.updates={critic.updates}: the learning rate would never reach "
            "critic.optimizer.lr; lower the one or raise the other"
        )


def _cluster_problems(config: RunConfig) -> Iterator[str]:
    """What the processes of a run are given."""
    engine, cluster = config.engine, config.cluster
    gpus = config.gpus_per_replica
    asked = f"cluster.gpus_per_replica is {cluster.gpus_per_replica}"
    if engine.device == "cpu" and gpus > 0:
        yield f"{asked} with engine.device=cpu, which uses none; set cluster.gpus_per_replica=null, or engine.device"
    elif engine.device == "cuda" and gpus == 0:
        yield f"{asked} with engine.device=cuda; set cluster.gpus_per_replica=null, or engine.device=cpu"
    elif gpus > 0 and (gpus > 1 or engine.ranks > 1) and (gpus % 1 or gpus < engine.ranks):
        yield (
            f"{asked} with engine.tensor_parallel={engine.tensor_parallel} and engine.data_parallel="
            f"{engine.data_parallel}: a replica needs one whole GPU per rank, and only a replica of one rank may take "
            "a part of one; set cluster.gpus_per_replica=null"
        )
    if 0 < gpus < 1 and engine.gpu_memory_utilization > gpus:
        yield (
            f"engine.gpu_memory_utilization is {engine.gpu_memory_utilization} with {gpus:g} of a GPU for a replica "
            "(cluster.gpus_per_replica), whose rest belongs to other processes; lower it to that share or less"
        )
    if engine.nodes > 1 and gpus % engine.nodes:
        yield (
            f"{asked} with engine.nodes={engine.nodes}, of which each has as many whole GPUs; set "
            "cluster.gpus_per_replica=null, or a multiple of engine.nodes"
        )
    if engine.nodes > 1 and config.sync.route == "memory":
        yield (
            f"engine.nodes is {engine.nodes} with sync.route=memory: the trainer's shared memory is on one node; set "
            "sync.route=broadcast, or sync.route=folder sync.directory=<a directory that all nodes see>"
        )
    if config.sync.backend == "nccl" and not (gpus and cluster.gpus_per_rank):
        yield (
            f"sync.backend is nccl with {cluster.gpus_per_rank:g} GPUs per rank and {gpus:g} per replica; NCCL needs "
            "one in each; set sync.backend=gloo"
        )
    for name, given, own in (
        ("rank_env", cluster.rank_env, set(rank_environment(config.trainer))),
        ("replica_env", cluster.replica_env, own_variables(engine)),
    ):
        if taken := sorted(own & set(given)):
            yield f"cluster.{name} sets {', '.join(taken)}, which the run sets itself; leave out {taken[0]}"
    if config.sync.mode == "rolling" and config.sync.max_paused >= engine.replicas:
        yield (
            f"sync.max_paused is {config.sync.max_paused} with sync.mode=rolling and engine.replicas="
            f"{engine.replicas}: a publish may pause every replica; lower it, or set sync.mode=at_once"
        )
    if config.captures_routing and isinstance(engine, VllmConfig) and not engine.is_eager("cpu") and not gpus:
        yield (
            "engine.enforce_eager is false with trainer.router_replay=R3 on the CPU, where compiled graphs return "
            "wrong expert ids without an error; set engine.enforce_eager=true, or trainer.router_replay=none"
        )


def _teacher_problems(config: RunConfig) -> Iterator[str]:
    """What teachers cannot score, and what their term makes useless."""
    rollout, loss, distillation = config.rollout, config.loss, config.distillation
    if not config.teachers:
        if distillation != DistillationConfig():
            yield "distillation is set, which has no effect without teachers; set teachers.NAME.checkpoint, or omit it"
        return
    for name, teacher in config.teachers.items():
        engine = teacher.engine
        if not re.fullmatch(r"[A-Za-z]\w*", name):
            yield f"teachers has the name {name!r}; use letters, digits and '_', and start with a letter"
        if rollout.limits.max_tokens >= engine.max_model_len:
            yield (
                f"teachers.{name}.engine.max_model_len is {engine.max_model_len} with rollout.limits.max_tokens="
                f"{rollout.limits.max_tokens}; a teacher needs one token more to score a rollout: raise the one "
                "or lower the other"
            )
        if engine.nodes > 1:
            yield f"teachers.{name}.engine.nodes is {engine.nodes}; a replica of a teacher is on one node: set it to 1"
        if isinstance(engine, VllmConfig) and engine.speculation is not None:
            yield f"teachers.{name}.engine.speculation is set, and a teacher samples nothing; omit it"
    sampling = rollout.sampling
    if sampling.temperature != 1 or sampling.is_cut:
        yield (
            f"rollout.sampling has temperature={sampling.temperature:g}, top_p={sampling.top_p:g}, "
            f"top_k={sampling.top_k} and min_p={sampling.min_p:g} with teachers, whose logprobs are over the whole "
            "vocabulary at temperature 1, so that student and teacher would not be compared alike; leave all four at "
            "their defaults"
        )
    if loss.count == "informative":
        yield "loss.count is informative with teachers, whose term is on all tokens; set loss.count=all"
    if distillation.kl == "reverse" and distillation.top_k != DistillationConfig().top_k:
        yield (
            f"distillation.top_k is {distillation.top_k} with distillation.kl=reverse, which needs the sampled token "
            "alone; leave it out, or set distillation.kl=forward or reverse_top_k"
        )
    if not distillation.rewards and (loss.penalises_rewards or rollout.drop_without_spread):
        yield (
            f"distillation.rewards is false with loss.kl_in={loss.kl_in} and rollout.drop_without_spread="
            f"{rollout.drop_without_spread}, which are about rewards; set loss.kl_in=loss and "
            "rollout.drop_without_spread=0"
        )


def _unused_options(config: RunConfig) -> Iterator[str]:
    """Options that another option switches off. A value equal to its default is accepted."""
    failure, record, validation = config.rollout.failure, config.rollout.record, config.validation
    tracking, lora, sends = config.tracking, config.trainer.lora, config.sync.route in ("broadcast", "direct")
    probes = config.mismatch.prompts > 0
    for path, section, name, used, with_it in (
        ("staleness", config.staleness, "max_requeues", config.staleness.policy == "recycle", "staleness=recycle"),
        ("rollout.failure", failure, "max_fills", failure.on_failed == "fill", "rollout.failure.on_failed=fill"),
        ("rollout.record", record, "trajectories", record.steps > 0, "rollout.record.steps > 0"),
        ("rollout.record", record, "routing_bytes", record.steps > 0, "rollout.record.steps > 0"),
        ("validation", validation, "samples", validation.prompts > 0, "validation.prompts > 0"),
        ("validation", validation, "sampling", validation.prompts > 0, "validation.prompts > 0"),
        ("tracking", tracking, "prometheus_address", "prometheus" in tracking.trackers, "prometheus in its trackers"),
        ("trainer.lora", lora, "alpha", lora.rank > 0, "trainer.lora.rank > 0"),
        ("trainer.lora", lora, "target_modules", lora.rank > 0, "trainer.lora.rank > 0"),
        ("sync", config.sync, "directory", config.sync.route == "folder", "sync.route=folder"),
        ("sync", config.sync, "backend", sends, "sync.route=broadcast or direct"),
        ("sync", config.sync, "delta", config.sync.route == "folder", "sync.route=folder"),
        ("sync", config.sync, "max_paused", config.sync.mode == "rolling", "sync.mode=rolling"),
        ("mismatch", config.mismatch, "max_k3", probes or config.walks_versions, "mismatch.prompts > 0"),
        ("mismatch", config.mismatch, "tokens", probes, "mismatch.prompts > 0"),
        ("cluster", config.cluster, "num_cpus", config.cluster.address is None, "cluster.address=null"),
        ("cluster", config.cluster, "object_store_bytes", config.cluster.address is None, "cluster.address=null"),
    ):
        value, default = getattr(section, name), type(section).__dataclass_fields__[name].default
        if not used and value != default:
            yield f"{path}.{name} is {value}, which does nothing without {with_it}; set that, or leave it at {default}"
