"""What one seed stands for: the settings of a run, how fast its parts are, and what goes wrong when."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from async_rl.inference.publisher import OnUpdate
from async_rl.inference.replica import KeptKV
from async_rl.rollout.rollouter import OnFailed
from message_queue.staleness import Policy, StalenessConfig
from message_queue.trajectory import ResumeRouting

FOR_EVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure at one moment of the run, such as `Fault(2, "load/replica-1", 3, "late weights", 4.5)`."""

    number: int
    """Place among the faults of the scenario, from 0."""
    point: str
    """Where it happens; see `Kind.points`."""
    at: int
    """How often the run passed `point` before; for "turn/x", the turn of the event loop, from 1."""
    kind: str
    """Key of `KINDS`."""
    amount: float
    """Seconds, tokens or rows; 0 if the kind has none."""

    def __str__(self) -> str:
        return f"#{self.number} {self.point}[{self.at}]: {self.kind} ({self.amount:g})"


Cost = Literal["nothing", "run", "part", "worker", "replica", "disk"]
"""What may be lost: the run stops; the trainer or the queue, or a rollout worker, which the run survives as often as
`supervision` allows; a replica, which leaves the fleet; the disk: the run stops with an error that names the journal.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to fail."""

    points: tuple[str, ...]
    """Where it may happen; "turn/x" is any turn of the event loop, hence any await of x."""
    weight: float = 1.0
    """How often, relative to the others."""
    first: tuple[int, int] = (0, 40)
    """Range of `at`, except at a turn and at a call."""
    amount: tuple[float, float] = (0.0, 0.0)
    """Range of seconds, tokens or rows."""
    costs: Cost = "nothing"
    """What may be lost."""
    drops_group: bool = False
    """Whether a group may be dropped."""
    starts: int = 1
    """Starts that it may take until the run continues."""


R, W, CALL = "{replica}", "{worker}", "call/queue.{method}"
CALLS = (
    "open", "admit", "put", "take", "drop", "trained", "publish", "loaded", "snapshot", "records_after", "sync",
    "checkpointed", "closing_records", "close_journal",
)  # fmt: skip
AFTER_PUBLISH = ("snapshot", "records_after", "loaded")
CALL_FIRST = (0, 8)
STORM = ("driver dies", "queue dies", "trainer dies", "worker dies")
WRITES = ("disk/queue/write", "disk/content/write", "disk/content/data")
TURNS = (20, 6000)  # of the event loop; a run has between 500 and 4,000
KINDS: dict[str, Kind] = {
    # an engine and one request
    "no answer": Kind(points=(f"generate/{R}",), costs="run", weight=0.5),
    "gives up": Kind(points=(f"generate/{R}",), amount=(0, 8), drops_group=True),
    "aborts by itself": Kind(points=(f"generate/{R}",), amount=(0, 8), weight=3),
    "unavailable rows": Kind(points=(f"answer/{R}",), first=(0, 60), amount=(1, 6)),
    "a row too few": Kind(points=(f"answer/{R}",), first=(0, 60), drops_group=True),
    "a refused answer": Kind(points=(f"answer/{R}",), first=(0, 60), drops_group=True),
    # an engine as a whole
    "engine dies": Kind(points=(f"generate/{R}", f"load/{R}"), first=(0, 20), costs="replica"),
    "process dies": Kind(points=(f"message/{R}", f"load/{R}", f"turn/{R}"), first=(0, 200), costs="replica", weight=2),
    "process hangs": Kind(points=(f"message/{R}",), first=(0, 200), costs="replica", weight=2),
    # weights
    "late weights": Kind(points=(f"load/{R}",), first=(0, 6), amount=(0.5, 15.0), weight=2),
    "weights never loaded": Kind(points=(f"load/{R}",), first=(0, 6), costs="replica"),
    "weights that did not arrive": Kind(points=(f"load/{R}",), first=(0, 6), costs="run", weight=0.5),
    "weights of another version": Kind(points=(f"load/{R}",), first=(0, 6), costs="run", weight=0.5),
    "weights refused": Kind(points=(f"load/{R}",), first=(0, 6), costs="run", weight=0.5),
    # messages
    "late message": Kind(
        points=("message/queue", CALL, f"message/{R}", f"message/{W}"), first=(0, 300), amount=(0.05, 8.0), weight=3
    ),
    # the queue, the trainer, the driver
    "queue dies": Kind(
        points=("message/queue", CALL, "turn/queue", "disk/queue/write", "disk/queue/commit"),
        first=(0, 200),
        costs="part",
        weight=3,
    ),
    "worker dies": Kind(
        points=(
            f"turn/{W}",
            f"turn/{W}",
            f"message/{W}",
            "disk/content/write",
            "disk/content/data",
            "disk/content/commit",
        ),
        first=(0, 200),
        costs="worker",
        weight=4,
    ),
    "worker hangs": Kind(points=(f"message/{W}",), first=(0, 100), costs="worker"),
    "queue hangs": Kind(points=("message/queue", CALL), first=(0, 200), costs="part"),
    "trainer dies": Kind(points=("train", "export", "save"), first=(0, 6), costs="part", weight=2),
    "trainer fails": Kind(points=("train", "export", "save"), first=(0, 6), costs="run", weight=2),
    "replica does not start": Kind(points=("start",), first=(0, 1), weight=0.5),
    "driver dies": Kind(
        points=("turn/driver", "turn/driver", *WRITES[1:], "disk/content/commit"),
        first=(0, 200),
        costs="run",
        weight=4,
    ),
    "stop is asked for": Kind(points=("turn/driver",)),
    # the disk
    "slow disk": Kind(points=("disk/work",), first=(0, 300), amount=(0.1, 8.0)),
    "disk is full": Kind(points=WRITES, first=(0, 200), amount=(0.1, 20.0), costs="disk"),
    "disk stays full": Kind(points=WRITES, first=(0, 200), amount=(FOR_EVER_S, FOR_EVER_S), costs="disk", starts=4),
    "disk is read-only": Kind(
        points=WRITES, first=(0, 200), amount=(FOR_EVER_S, FOR_EVER_S), costs="disk", starts=4, weight=0.5
    ),
    "disk fails": Kind(points=(*WRITES, "disk/queue/read"), first=(0, 200), costs="disk"),
    "bits flip": Kind(points=("disk/open",), first=(1, 4)),
    "events are damaged": Kind(points=("disk/open",), first=(1, 4), costs="disk"),
    # tools and rewards
    "tool says no": Kind(points=("tool",), first=(0, 20)),
    "tool is broken": Kind(points=("tool",), first=(0, 20), drops_group=True),
    "slow tool": Kind(points=("tool", "reward"), first=(0, 20), amount=(0.5, 4.0)),
    "no end of a tool": Kind(points=("tool",), first=(0, 20)),
    "reward fails": Kind(points=("reward",), first=(0, 20), drops_group=True),
    "no end of a reward": Kind(points=("reward",), first=(0, 20), drops_group=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Settings of a run, and the speed of its parts in virtual seconds."""

    seed: int
    """Of the run and of everything that is drawn."""
    steps: int
    """Optimizer steps; a batch makes `updates_per_batch`."""
    batch_groups: int
    """Groups of a batch; `rollout.groups_per_batch`."""
    trajectories_per_group: int
    """Rollouts of a prompt; `rollout.trajectories_per_group`."""
    max_staleness: int
    """Bound in optimizer steps; `staleness.max_staleness`."""
    policy: Policy
    """Treatment of groups beyond the bound; `staleness.policy`."""
    max_recycles: int
    """How often a prompt is admitted again for its age; used by the policy "recycle" only."""
    on_failed: OnFailed
    """Treatment of groups with a failed rollout; `rollout.failure.on_failed`."""
    publish_every: int
    """Optimizer steps between two publishes; `sync.every`."""
    updates_per_batch: int
    """Optimizer steps, hence mini-batches, of a batch; `trainer.updates_per_batch`."""
    on_update: OnUpdate
    """Treatment of requests while weights are loaded; `rollout.on_update`."""
    kv: KeptKV
    """Treatment of the KV cache of frozen requests; `rollout.kv`."""
    resume_routing: ResumeRouting
    """How rows of resumed requests are merged; `rollout.resume_routing`."""
    max_ready: int | None
    """Finished groups that the queue holds at most; `queue.max_ready`. None: as many as the staleness bound allows."""
    max_turns: int
    """Model calls of a rollout; `rollout.limits.max_turns`."""
    max_tokens: int
    """Tokens of a trajectory, prompt included; `rollout.limits.max_tokens`."""
    checkpoint_every: int
    """Optimizer steps between two checkpoints; `checkpoint.every`, 0: only at the end or on a stop."""
    validation: bool
    """Whether two held-out prompts are rolled out after each train step."""
    file_bytes: int
    """Bytes of a data file of the content, before the next file is started."""
    max_restarts: int
    """Restarts of a part that `supervision.max_restarts` allows."""
    replicas: int
    """Number of replicas."""
    workers: int
    """Number of rollout workers."""
    latency_s: float
    """Mean seconds of a message, one way."""
    token_s: tuple[float, ...]
    """Seconds of each replica for one token of a request."""
    train_s: float
    """Seconds for a batch."""
    load_s: float
    """Seconds in which an engine loads weights."""
    tool_s: float
    """Seconds of a tool or a reward."""
    top_p: float
    """`rollout.sampling.top_p`; engines return the tokens that they kept if it is below 1."""
    faults: tuple[Fault, ...]
    """In the order in which they were drawn."""

    @property
    def staleness(self) -> StalenessConfig:
        """The bound and the policy."""
        config = StalenessConfig(max_staleness=self.max_staleness, policy=self.policy)
        return replace(config, max_recycles=self.max_recycles) if self.policy == "recycle" else config

    @property
    def most_starts(self) -> int:
        """How often the run is started at most until it is done."""
        kinds = [KINDS[fault.kind] for fault in self.faults]
        stops = sum(fault.kind == "stop is asked for" for fault in self.faults)
        return 1 + stops + sum(kind.starts for kind in kinds if kind.costs != "nothing")

    def may_end(self, error: str, *, fired: Sequence[Fault], lost: int, disk_was_broken: bool) -> bool:
        """Whether the run may end with an error.

        Args:
            fired: faults since it was started.
            lost: replicas.
            disk_was_broken: when it was started.
        """
        costs = Counter(KINDS[fault.kind].costs for fault in fired)
        return bool(
            costs["run"]
            or (lost >= self.replicas and costs["replica"])
            or costs["part"] > self.max_restarts
            or costs["worker"] >= self.workers * (self.max_restarts + 1)
            or ("journal" in error and (disk_was_broken or costs["disk"]))
        )


def may_drop(fired: Iterable[Fault]) -> bool:
    """Whether a group may be dropped for a failed rollout after these faults."""
    return any(KINDS[fault.kind].drops_group for fault in fired)


def draw_scenario(seed: int, *, faults: bool = True) -> Scenario:
    """The scenario of a seed; without faults only its schedule is random."""
    draw = random.Random(f"scenario {seed}")
    replicas = draw.choice((1, 2, 2, 3))
    workers = random.Random(f"workers {seed}").choice((1, 1, 2, 3))
    per_batch = random.Random(f"mini-batches {seed}").choice((1, 1, 1, 1, 1, 2, 3, 4))
    batch_groups = draw.randint(1, 4) * per_batch
    publish_every = draw.choice((1, 1, 1, 2, 3)) * per_batch
    on_update: OnUpdate = draw.choice(get_args(OnUpdate))
    policies = random.Random(f"policies {seed}")
    beyond_batches = random.Random(f"bound {seed}").choice((0, 0, 1, 2)) if per_batch > 1 else 0
    return Scenario(
        seed=seed,
        steps=draw.randint(2, 6) * per_batch,
        batch_groups=batch_groups,
        trajectories_per_group=draw.randint(1, 3),
        max_staleness=draw.choice((0, 1, 1, 2, 4)) * per_batch + publish_every - 1 + beyond_batches,
        policy=policies.choice((draw.choice(("wait", "drop")), "recycle", "mask")),
        max_recycles=policies.choice((1, 1, 3)),
        on_failed=policies.choice(("drop", "drop", "fill")),
        publish_every=publish_every,
        updates_per_batch=per_batch,
        on_update=on_update,
        kv=draw.choice(get_args(KeptKV)) if on_update == "keep" else "recompute",
        resume_routing=draw.choice(("append", "append", *get_args(ResumeRouting))),
        max_ready=draw.choice((None, None, batch_groups, batch_groups + 2)),
        max_turns=draw.randint(1, 4),
        max_tokens=draw.choice((16, 32, 48)),
        checkpoint_every=draw.choice((0, 1, 1, 2)),
        validation=draw.random() < 0.2,
        file_bytes=draw.choice((1 << 10, 1 << 13, 1 << 20)),
        max_restarts=draw.choice((0, 1, 3, 3)),
        replicas=replicas,
        workers=workers,
        latency_s=draw.choice((0.0005, 0.005, 0.05)),
        token_s=tuple(draw.choice((0.002, 0.02, 0.1)) for _ in range(replicas)),
        train_s=draw.choice((0.01, 0.3, 2.0)),
        load_s=draw.choice((0.01, 0.2, 1.0)),
        tool_s=draw.choice((0.01, 0.3)),
        top_p=0.9 if seed % 6 == 5 else 1.0,
        faults=_draw_faults(draw, seed, replicas=replicas, workers=workers) if faults else (),
    )


def _draw_faults(draw: random.Random, seed: int, *, replicas: int, workers: int) -> tuple[Fault, ...]:
    """None for one seed in nine, else up to eight; for one in ten, one restart after the other.

    Two for one seed in sixteen in which a step is missing after its weights were published.
    """
    storm = draw.random() < 0.1
    names = list(STORM) if storm else list(KINDS)
    weights, count = [KINDS[name].weight for name in names], 5 if storm else draw.choice((0, 1, 1, 2, 3, 4, 6, 8))
    drawn = [
        _draw_fault(draw, number, draw.choices(names, weights)[0], replicas=replicas, workers=workers)
        for number in range(count)
    ]
    aimed = random.Random(f"damage {seed}")
    if aimed.random() < 1 / 16:
        call = CALL.format(method=aimed.choice(AFTER_PUBLISH))
        drawn.append(Fault(len(drawn), call, aimed.randrange(3), "queue dies", 0.0))
        drawn.append(Fault(len(drawn), "disk/open", 1, "bits flip", 0.0))
    return tuple(drawn)


def _draw_fault(draw: random.Random, number: int, name: str, *, replicas: int, workers: int) -> Fault:
    kind = KINDS[name]
    point = draw.choice(kind.points)
    low, high = TURNS if point.startswith("turn/") else CALL_FIRST if point == CALL else kind.first
    point = point.format(
        replica=f"replica-{draw.randrange(replicas)}",
        worker=f"worker-{draw.randrange(workers)}",
        method=draw.choice(CALLS),
    )
    at = low + int((high - low) * draw.random() ** 2)  # early ones more often: runs differ in length
    return Fault(number, point, at, name, round(draw.uniform(*kind.amount), 3))
