"""What one seed stands for: the settings of a run, how fast its parts are, and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import get_args

from async_rl.engines.replica import KeptKV
from async_rl.rollout.rollouter import OnFailed
from async_rl.simulate.bad_answers import BAD_ANSWERS
from async_rl.weights.publisher import OnUpdate
from message_queue.staleness import Policy, StalenessConfig
from message_queue.trajectory import ResumeRouting

UNAVAILABLE = "unavailable rows"
FOR_EVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Fault:
    """The `at`-th time that the run passes `point`, `kind` happens there; amount: seconds, tokens or rows."""

    number: int
    point: str
    at: int
    kind: str
    amount: float

    def __str__(self) -> str:
        return f"#{self.number} {self.point}[{self.at}]: {self.kind} ({self.amount:g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to fail.

    points: where it may happen; "turn/x" is any turn of the event loop, hence any await of x. first: the range of `at`
    elsewhere. weight: how often, relative to the others. ends_run: the run may stop, and is started again.
    loses_part: the trainer or the queue is lost, which the run survives as often as `supervision` allows.
    loses_worker: a rollout worker is lost, which the run survives as often as `supervision` allows for each.
    loses_replica: the replica may leave the fleet. drops_group: a group may be dropped. of_disk: the run may stop with
    an error that names the journal. starts: that it may take until the run goes on.
    """

    points: tuple[str, ...]
    weight: float = 1.0
    first: tuple[int, int] = (0, 40)
    amount: tuple[float, float] = (0.0, 0.0)
    ends_run: bool = False
    loses_part: bool = False
    loses_replica: bool = False
    loses_worker: bool = False
    drops_group: bool = False
    of_disk: bool = False
    starts: int = 1


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
    "late answer": Kind(points=(f"generate/{R}",), amount=(0.1, 15.0)),
    "no answer": Kind(points=(f"generate/{R}",), ends_run=True, loses_replica=True, weight=0.5),
    "gives up": Kind(points=(f"generate/{R}",), amount=(0, 8), drops_group=True),
    "aborts by itself": Kind(points=(f"generate/{R}",), amount=(0, 8), weight=3),
    UNAVAILABLE: Kind(points=(f"answer/{R}",), first=(0, 60), amount=(1, 6)),
    **{name: Kind(points=(f"answer/{R}",), first=(0, 60), drops_group=True, weight=0.3) for name in BAD_ANSWERS},
    # an engine as a whole
    "engine dies": Kind(points=(f"generate/{R}", f"load/{R}"), first=(0, 20), loses_replica=True),
    "process dies": Kind(
        points=(f"message/{R}", f"load/{R}", f"turn/{R}"), first=(0, 200), loses_replica=True, weight=2
    ),
    "process hangs": Kind(points=(f"message/{R}",), first=(0, 200), loses_replica=True, weight=2),
    # weights
    "late weights": Kind(points=(f"load/{R}",), first=(0, 6), amount=(0.5, 15.0), weight=2),
    "weights never loaded": Kind(points=(f"load/{R}",), first=(0, 6), loses_replica=True),
    "weights that did not arrive": Kind(points=(f"load/{R}",), first=(0, 6), ends_run=True, weight=0.5),
    "weights of another version": Kind(points=(f"load/{R}",), first=(0, 6), ends_run=True, weight=0.5),
    "weights refused": Kind(points=(f"load/{R}",), first=(0, 6), ends_run=True, weight=0.5),
    # messages
    "late message": Kind(
        points=("message/queue", CALL, f"message/{R}", f"message/{W}"), first=(0, 300), amount=(0.05, 8.0), weight=3
    ),
    # the queue, the trainer, the driver
    "queue dies": Kind(
        points=("message/queue", CALL, "turn/queue", "disk/queue/write", "disk/queue/commit"),
        first=(0, 200),
        loses_part=True,
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
        loses_worker=True,
        weight=4,
    ),
    "worker hangs": Kind(points=(f"message/{W}",), first=(0, 100), loses_worker=True),
    "queue hangs": Kind(points=("message/queue", CALL), first=(0, 200), loses_part=True),
    "trainer dies": Kind(points=("train", "export", "save"), first=(0, 6), loses_part=True, weight=2),
    "trainer fails": Kind(points=("train", "export", "save"), first=(0, 6), ends_run=True, weight=2),
    "replica does not start": Kind(points=("start",), first=(0, 1), weight=0.5),
    "slow start": Kind(points=("start",), first=(0, 1), amount=(1.0, 60.0), weight=0.5),
    "slow trainer": Kind(points=("train", "export", "save"), first=(0, 6), amount=(0.5, 30.0)),
    "driver dies": Kind(
        points=("turn/driver", "turn/driver", *WRITES[1:], "disk/content/commit"),
        first=(0, 200),
        ends_run=True,
        weight=4,
    ),
    "stop is asked for": Kind(points=("turn/driver",)),
    # the disk
    "slow disk": Kind(points=("disk/work",), first=(0, 300), amount=(0.1, 8.0)),
    "disk is full": Kind(points=WRITES, first=(0, 200), amount=(0.1, 20.0), ends_run=True, of_disk=True),
    "disk stays full": Kind(
        points=WRITES, first=(0, 200), amount=(FOR_EVER_S, FOR_EVER_S), ends_run=True, of_disk=True, starts=4
    ),
    "disk is read-only": Kind(
        points=WRITES,
        first=(0, 200),
        amount=(FOR_EVER_S, FOR_EVER_S),
        ends_run=True,
        of_disk=True,
        starts=4,
        weight=0.5,
    ),
    "disk fails": Kind(points=(*WRITES, "disk/queue/read"), first=(0, 200), ends_run=True, of_disk=True),
    "bits flip": Kind(points=("disk/open",), first=(1, 4), ends_run=True, drops_group=True, starts=2),
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
    """Settings of the run as in the run config, and how long things take, in virtual seconds.

    steps: optimizer steps; a batch makes `updates_per_batch` of them.
    workers: rollout workers. latency_s: mean of a message. token_s: of each replica. edge: whether a replica checks its
    answers itself. file_bytes: of a data file of the content. max_restarts: of supervision. top_p: of sampling; below 1
    engines return the tokens that they kept.
    """

    seed: int
    steps: int
    batch_groups: int
    trajectories_per_group: int
    max_staleness: int
    policy: Policy
    max_recycles: int
    on_failed: OnFailed
    publish_every: int
    updates_per_batch: int
    on_update: OnUpdate
    kv: KeptKV
    resume_routing: ResumeRouting
    max_ready: int | None
    max_turns: int
    max_tokens: int
    checkpoint_every: int
    validation: bool
    file_bytes: int
    max_restarts: int
    replicas: int
    workers: int
    edge: bool
    latency_s: float
    token_s: tuple[float, ...]
    train_s: float
    load_s: float
    tool_s: float
    top_p: float
    faults: tuple[Fault, ...]

    @property
    def staleness(self) -> StalenessConfig:
        """The bound and the policy."""
        config = StalenessConfig(max_staleness=self.max_staleness, policy=self.policy)
        return replace(config, max_recycles=self.max_recycles) if self.policy == "recycle" else config


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
        edge=draw.random() < 0.5,
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
