"""RunConfig: every value of a run, typed.

Defaults are in frozen dataclasses, each next to the class that it configures. Importing this module does not import
torch or megatron.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from statistics import median_low
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from pydantic import Field as PydanticField

from agent_loop.bounds import Count, Seconds, bounded
from agent_loop.engine import SamplingConfig
from agent_loop.loop import TurnLimits
from agent_loop.programs.endpoint.host import EndpointConfig
from async_rl.config.rules import problems_of
from async_rl.files.rollouts import RecordConfig
from async_rl.inference.gate import KVPolicy
from async_rl.inference.publisher import OnUpdate, SyncMode
from async_rl.inference.select import EngineConfig, ReplicaSettings
from async_rl.inference.supervisor import SupervisionConfig
from async_rl.metrics.trackers import TrackingConfig
from async_rl.rollout.rollouter import FailureConfig
from async_rl.rollout.task import TaskConfig
from async_rl.rollout.teachers import TeacherConfig
from async_rl.trainer.batch.baselines import GRPO, AdvantageConfig
from async_rl.trainer.critic.config import CriticConfig
from async_rl.trainer.critic.gae import GAE
from async_rl.trainer.loss.distillation import DistillationConfig
from async_rl.trainer.loss.losses import LossConfig
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.transport import Backend
from message_queue.errors import AsyncRLError
from message_queue.journal import JournalConfig
from message_queue.policies import StalenessConfig
from message_queue.trajectory import ResumeRouting

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
        if problems := list(problems_of(self)):
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
