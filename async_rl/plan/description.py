"""What a plan is made of: a cluster, a workload, rates, settings of the asynchrony, interruptions. Read from YAML.

    cluster: {gpus: 64, gpus_per_replica: 2, train_gpus: 24}
    workload:
      groups_per_batch: 64
      trajectories_per_group: 16
      lengths: {kind: lognormal, mean: 4000, cv: 1.2, maximum: 32768}
    rates: {decode_s: 0.012, decode_s_per_request: 0.00008, max_running: 128, train_tokens_per_s: 4000}
    staleness: {max_staleness: 2}

All times are in seconds, all rates per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import yaml
from annotated_types import Ge, Gt, Le, Lt
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from agent_loop.bounds import Count
from async_rl.files.validation import explain
from async_rl.inference.gate import KVPolicy
from async_rl.inference.publisher import OnUpdate, SyncMode
from message_queue.errors import AsyncRLError
from message_queue.policies import StalenessConfig

Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]


class PlanError(AsyncRLError, ValueError):
    """A plan cannot be made; names the field, its value and the way out."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Distribution(_Strict):
    """Distribution of a length in tokens, or of a duration in seconds."""

    kind: Literal["constant", "exponential", "lognormal", "empirical"] = "constant"
    """`constant` and `exponential` have a mean, `lognormal` also a cv, `empirical` draws from `values`."""
    mean: NotNegative = 0.0
    """Mean before `maximum` is applied."""
    cv: Positive = 1.0
    """Standard deviation over mean, of `lognormal`."""
    values: tuple[NotNegative, ...] = ()
    """Sample that `empirical` draws from."""
    maximum: Positive = math.inf
    """Larger values are cut to this one, as a token limit does."""

    @model_validator(mode="after")
    def _has_values(self) -> Self:
        if (self.kind == "empirical") != bool(self.values):
            raise ValueError(f"kind is {self.kind!r} with {len(self.values)} values; give values to 'empirical' only")
        return self

    def sample(self, draw: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Independent values, float64 of `shape`."""
        match self.kind:
            case "constant":
                drawn = np.full(shape, self.mean)
            case "exponential":
                drawn = draw.exponential(self.mean, shape)
            case "lognormal":
                sigma = math.sqrt(math.log1p(self.cv**2))
                drawn = self.mean * np.exp(draw.normal(-(sigma**2) / 2, sigma, shape))
            case "empirical":
                drawn = draw.choice(self._array, shape)
        return np.minimum(drawn, self.maximum)

    @cached_property
    def _array(self) -> NDArray[np.float64]:
        """float64 [values]; made once, as a run has tens of thousands of values and a draw for each call of a tool."""
        return np.array(self.values, np.float64)


class Cluster(_Strict):
    """GPUs, and how they are divided."""

    gpus: Count
    """All GPUs; those that make no whole replica are idle."""
    gpus_per_replica: Count = 1
    """GPUs of one engine replica."""
    train_gpus: Count
    """GPUs of the trainer; the replicas have the others."""
    train_gpus_unit: Count = 1
    """GPUs of one copy of the model in the trainer; the splits that are tried are its multiples."""
    synchronous: Literal["colocated", "split"] = "colocated"
    """GPUs of the synchronous run: all GPUs generate and then all train, or the split of the asynchronous run."""


class Workload(_Strict):
    """Trajectories of a train step."""

    groups_per_batch: Count
    """Prompt groups of a batch."""
    trajectories_per_group: Count
    """Trajectories of a prompt group."""
    lengths: Distribution
    """Sampled tokens of a trajectory."""
    prompt_tokens: NotNegative = 0.0
    """Tokens of a prompt, and so of each trajectory, that are not sampled."""
    prefix_sharing: bool = False
    """Whether the trainer computes the prompt of a group once (`trainer.prefix_sharing`)."""
    old_policy: bool = False
    """Whether the trainer scores tokens with the weights that sampled them (`mismatch.verify=every_token`). A token of
    such a pass costs a third of one that is trained, without backward pass."""
    critic: NotNegative = 0.0
    """Passes of a critic (`advantage.name=gae`) over a token, in units of its training: critic.updates + 1/3 with an
    own trunk, 1/3 with a shared one. Rates from the records of a run with a critic include them."""
    turns: Count = 1
    """Model calls of a trajectory, of equal lengths."""
    tool_s: Distribution = Distribution()
    """Time between two turns; the replica has the place free meanwhile."""
    reward_s: Distribution = Distribution()
    """Time from the last token of a trajectory until its reward and the scores of its teachers are there."""
    without_signal: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the groups whose rewards are equal. They have no gradient, so these rollouts are wasted."""
    bytes_per_token: NotNegative = 8.0
    """Bytes that a rollout worker receives for each token: 8 for id and logprob, and the routing rows."""


class Rates(_Strict):
    """Speed of replicas, trainer and publishes."""

    decode_s: Positive
    """Seconds of a decode step with one request, without `decode_s_per_request`."""
    decode_s_per_request: NotNegative = 0.0
    """Seconds that each running request adds to a decode step."""
    max_running: Count = 256
    """Requests that a replica runs at a time; others wait."""
    prefill_tokens_per_s: Positive = math.inf
    """Prompt tokens per second of a replica; no token is decoded meanwhile."""
    train_tokens_per_s: Positive = math.inf
    """Tokens per second of one GPU of the trainer, of all passes together; prompt tokens count."""
    train_s: NotNegative = 0.0
    """Seconds of a train step that do not depend on tokens and GPUs."""
    export_s: NotNegative = 0.0
    """Seconds of the trainer for the export of a version."""
    transfer_s: NotNegative = 0.0
    """Seconds of the transfer of a version to the replicas before their pause."""
    load_s: NotNegative = 0.0
    """Seconds of the pause while a replica loads a version."""
    switch_s: NotNegative = 0.0
    """Seconds per step that colocated GPUs take to change from training to generation and back."""
    shared_speed: Annotated[float, Gt(0), Le(1)] = 1.0
    """Speed of trainer and replicas while both work, over that of each alone; below 1 if they share cores."""
    model_bytes: NotNegative = 0.0
    """Bytes of a version."""

    def step_s(self, running: float) -> float:
        """Seconds of a decode step with that many requests."""
        return self.decode_s + self.decode_s_per_request * running

    def thinned(self, requests_of: float) -> Self:
        """Rates at which each request of a replica costs as much as `requests_of`."""
        changes = {
            "decode_s_per_request": self.decode_s_per_request * requests_of,
            "max_running": max(1, round(self.max_running / requests_of)),
            "prefill_tokens_per_s": self.prefill_tokens_per_s / requests_of,
        }
        return self.model_copy(update=changes)


class Publish(_Strict):
    """Treatment of requests in flight, and order of the replicas; as in `rollout` and `sync` of a run."""

    on_update: OnUpdate = "resume"
    """`rollout.on_update`."""
    kv: KVPolicy = "recompute"
    """`rollout.kv`."""
    mode: SyncMode = "at_once"
    """`sync.mode`."""
    max_paused: Count = 1
    """`sync.max_paused`."""
    every: Count = 1
    """`sync.every`."""


class Interruptions(_Strict):
    """Work and faults besides rollouts and training; none by default."""

    checkpoint_every: Count = 1
    """Train steps between checkpoints."""
    checkpoint_s: NotNegative = 0.0
    """Seconds of a checkpoint; the trainer does nothing else meanwhile."""
    validation_every: Count = 1
    """Train steps between validations."""
    validation_trajectories: Annotated[int, Ge(0)] = 0
    """Trajectories of a validation, with the lengths of the others."""
    failed: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the groups that fail at their end, and whose place another group takes."""
    slow_replica: Annotated[float, Ge(1)] = 1.0
    """Seconds of a decode step of the last replica, over those of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A cluster, its work and its speed."""

    cluster: Cluster
    """GPUs."""
    workload: Workload
    """Trajectories."""
    rates: Rates
    """Speed."""
    publish: Publish = field(default_factory=Publish)
    """Publishes."""
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    """Bound and policy."""
    interruptions: Interruptions = field(default_factory=Interruptions)
    """Validations, checkpoints and faults."""

    def __post_init__(self) -> None:
        cluster = self.cluster
        if not 0 < cluster.train_gpus <= cluster.gpus - cluster.gpus_per_replica:
            raise PlanError(
                f"cluster.train_gpus is {cluster.train_gpus} of {cluster.gpus} GPUs; leave at least the "
                f"cluster.gpus_per_replica={cluster.gpus_per_replica} of one replica"
            )
        bound, every = self.staleness.max_staleness, self.publish.every
        if bound < every - 1:
            raise PlanError(
                f"staleness.max_staleness is {bound} with publish.every={every}: the batches between two publishes "
                f"exceed the bound; set it to at least {every - 1}"
            )


def read_description(path: Path) -> Description:
    """A description of a YAML file.

    Raises:
        PlanError: the file cannot be read, or a value makes no sense; one line per problem.
    """
    try:
        values: Any = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise PlanError(f"{path} cannot be read: {error}") from error
    keys = sorted(each.name for each in fields(Description))
    if found := sorted(values.keys() - keys) if isinstance(values, dict) else [values]:
        raise PlanError(f"{path} has {found}; its keys are {', '.join(keys)}")
    try:
        return TypeAdapter(Description).validate_python(values)
    except ValidationError as error:
        raise PlanError("\n".join(f"{path}: {explain(each)}" for each in error.errors())) from error
