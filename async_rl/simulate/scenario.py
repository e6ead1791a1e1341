"""What one seed stands for: the settings of a run, how fast its parts are, and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal, get_args

from async_rl.engines.replica import KeptKV
from async_rl.rollout.rollouter import OnFailed
from async_rl.simulate.bad_answers import BAD_ANSWERS
from async_rl.weights.publisher import OnUpdate
from message_queue.staleness import Policy, StalenessConfig
from message_queue.trajectory import ResumeRouting

UNAVAILABLE = "unavailable rows"
Fsync = Literal["always", "interval", "never"]
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
    drops_group: bool = False
    of_disk: bool = False
    starts: int = 1


R, CALL = "{replica}", "call/queue.{method}"
ONCE = ("open", "admit", "append", "put_bytes", "take_bytes", "drop", "trained", "publish", "loaded", "snapshot")
LATE = ("sync", "checkpointed", "closing_records", "close_journal", "withdraw", "resume")
CALLS = (*ONCE, *["drain_records"] * 6, *LATE)
AFTER_PUBLISH = ("snapshot", "drain_records", "loaded")
CALL_FIRST = (0, 8)
STORM = ("driver dies", "machine dies", "queue dies", "trainer dies")
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
    "late message": Kind(points=("message/queue", CALL, f"message/{R}"), first=(0, 300), amount=(0.05, 8.0), weight=3),
    "message twice": Kind(points=("message/queue", CALL), first=(0, 300), amount=(0.0, 0.5), weight=5),
    # the queue, the trainer, the driver
    "queue dies": Kind(
        points=("message/queue", CALL, "turn/queue", "disk/write", "disk/sync"),
        first=(0, 300),
        loses_part=True,
        weight=3,
    ),
    "trainer dies": Kind(points=("train", "export", "save"), first=(0, 6), loses_part=True, weight=2),
    "trainer fails": Kind(points=("train", "export", "save"), first=(0, 6), ends_run=True, weight=2),
    "replica does not start": Kind(points=("start",), first=(0, 1), weight=0.5),
    "slow start": Kind(points=("start",), first=(0, 1), amount=(1.0, 60.0), weight=0.5),
    "slow trainer": Kind(points=("train", "export", "save"), first=(0, 6), amount=(0.5, 30.0)),
    "driver dies": Kind(points=("turn/driver",), ends_run=True, weight=3),
    "stop is asked for": Kind(points=("turn/driver",)),
    "shard hangs": Kind(points=(), weight=0, loses_part=True),  # drawn with the shards
    # the machine and the disk of the journal
    "machine dies": Kind(
        points=("turn/driver", CALL, "disk/write", "disk/sync"), first=(0, 300), ends_run=True, weight=3
    ),
    "slow disk": Kind(points=("disk/write", "disk/sync"), first=(0, 300), amount=(0.1, 8.0)),
    "disk is full": Kind(points=("disk/write",), first=(0, 300), amount=(0.1, 20.0), ends_run=True, of_disk=True),
    "disk stays full": Kind(
        points=("disk/write",), first=(0, 300), amount=(FOR_EVER_S, FOR_EVER_S), ends_run=True, of_disk=True, starts=4
    ),
    "disk is read-only": Kind(
        points=("disk/lock", "disk/write"),
        first=(0, 300),
        amount=(FOR_EVER_S, FOR_EVER_S),
        ends_run=True,
        of_disk=True,
        starts=4,
        weight=0.5,
    ),
    "disk fails": Kind(points=("disk/write", "disk/sync", "disk/read"), first=(0, 300), ends_run=True, of_disk=True),
    "bits flip": Kind(points=("disk/lock",), first=(1, 4), ends_run=True, drops_group=True, starts=2),
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
    later_staleness: of the driver's starts after the first, in turn; none: the same for all.
    latency_s: mean of a message. token_s: of each replica. edge: whether a replica checks its answers itself.
    fsync, file_bytes, buffer_bytes: of the journal. max_restarts: of supervision. shards: of the queue.
    together: calls to the queue travel as in `message_queue.together`. top_p: of sampling; below 1 engines return what
    they kept.
    """

    seed: int
    steps: int
    batch_groups: int
    trajectories_per_group: int
    max_staleness: int
    policy: Policy
    later_staleness: tuple[StalenessConfig, ...]
    max_recycles: int
    on_failed: OnFailed
    publish_every: int
    updates_per_batch: int
    on_update: OnUpdate
    kv: KeptKV
    resume_routing: ResumeRouting
    max_ready: int | None
    rank_code_rows: bool
    max_turns: int
    max_tokens: int
    checkpoint_every: int
    validation: bool
    fsync: Fsync
    file_bytes: int
    buffer_bytes: int
    max_restarts: int
    replicas: int
    edge: bool
    latency_s: float
    token_s: tuple[float, ...]
    train_s: float
    load_s: float
    tool_s: float
    shards: int
    together: bool
    top_p: float
    faults: tuple[Fault, ...]

    def staleness_of(self, start: int) -> StalenessConfig:
        """Of the driver's start of that number."""
        at_first = StalenessConfig(max_staleness=self.max_staleness, policy=self.policy)
        later = self.later_staleness
        config = later[(start - 1) % len(later)] if start and later else at_first
        return replace(config, max_recycles=self.max_recycles) if config.policy == "recycle" else config


def draw_scenario(seed: int, *, faults: bool = True) -> Scenario:
    """The scenario of a seed; without faults only its schedule is random."""
    draw = random.Random(f"scenario {seed}")
    replicas = draw.choice((1, 2, 2, 3))
    per_batch = random.Random(f"mini-batches {seed}").choice((1, 1, 1, 1, 1, 2, 3, 4))
    batch_groups = draw.randint(1, 4) * per_batch
    publish_every = draw.choice((1, 1, 1, 2, 3)) * per_batch
    on_update: OnUpdate = draw.choice(get_args(OnUpdate))
    policies = random.Random(f"policies {seed}")
    later = _draw_later_staleness(seed, least=publish_every - 1)
    shards = random.Random(f"shards {seed}")
    num_shards = shards.choice((1, 1, 2, 3))
    return Scenario(
        seed=seed,
        steps=draw.randint(2, 6) * per_batch,
        batch_groups=batch_groups,
        trajectories_per_group=draw.randint(1, 3),
        max_staleness=draw.choice((0, 1, 1, 2, 4)) * per_batch + publish_every - 1,
        policy=policies.choice((draw.choice(("wait", "drop")), "recycle", "mask")),
        later_staleness=later,
        max_recycles=policies.choice((1, 1, 3)),
        on_failed=policies.choice(("drop", "drop", "fill")),
        publish_every=publish_every,
        updates_per_batch=per_batch,
        on_update=on_update,
        kv=draw.choice(get_args(KeptKV)) if on_update == "keep" else "recompute",
        resume_routing=draw.choice(("append", "append", *get_args(ResumeRouting))),
        max_ready=draw.choice((None, None, batch_groups, batch_groups + 2)),
        rank_code_rows=draw.random() < 0.2,
        max_turns=draw.randint(1, 4),
        max_tokens=draw.choice((16, 32, 48)),
        checkpoint_every=draw.choice((0, 1, 1, 2)),
        validation=draw.random() < 0.2,
        fsync=draw.choice(("always", "interval", "interval", "interval", "never")),
        file_bytes=draw.choice((1 << 10, 1 << 13, 1 << 20)),
        buffer_bytes=draw.choice((1, 1 << 12, 1 << 20)),
        max_restarts=draw.choice((0, 1, 3, 3)),
        replicas=replicas,
        edge=draw.random() < 0.5,
        latency_s=draw.choice((0.0005, 0.005, 0.05)),
        token_s=tuple(draw.choice((0.002, 0.02, 0.1)) for _ in range(replicas)),
        train_s=draw.choice((0.01, 0.3, 2.0)),
        load_s=draw.choice((0.01, 0.2, 1.0)),
        tool_s=draw.choice((0.01, 0.3)),
        shards=num_shards,
        together=seed % 5 == 0,
        top_p=0.9 if seed % 6 == 5 else 1.0,
        faults=_with_shards(
            shards,
            _draw_faults(draw, seed, replicas=replicas, goes_on_otherwise=bool(later)),
            shards=num_shards,
        )
        if faults
        else (),
    )


def _draw_later_staleness(seed: int, *, least: int) -> tuple[StalenessConfig, ...]:
    """For one seed in five, somebody goes on with another policy, or another bound."""
    draw = random.Random(f"later staleness {seed}")
    if draw.random() >= 0.2:
        return ()
    return tuple(
        StalenessConfig(max_staleness=least + draw.choice((0, 0, 1, 2)), policy=policy)
        for policy in draw.choices(get_args(Policy), k=draw.choice((1, 2)))
    )


def _draw_faults(draw: random.Random, seed: int, *, replicas: int, goes_on_otherwise: bool) -> tuple[Fault, ...]:
    """None for one seed in nine, else up to eight; for one in ten, one restart after the other.

    One more where another start is what the seed is about; two for one seed in sixteen, where a step is lost after its
    weights were published; one for one in 27, where the power is lost when a checkpoint was made.
    """
    storm = draw.random() < 0.1
    names = list(STORM) if storm else list(KINDS)
    weights, count = [KINDS[name].weight for name in names], 5 if storm else draw.choice((0, 1, 1, 2, 3, 4, 6, 8))
    drawn = [_draw_fault(draw, number, draw.choices(names, weights)[0], replicas=replicas) for number in range(count)]
    if goes_on_otherwise:
        drawn.append(_draw_fault(draw, len(drawn), "driver dies", replicas=replicas))
    aimed = random.Random(f"damage {seed}")
    roll = aimed.random()
    if roll < 1 / 16:
        call = CALL.format(method=aimed.choice(AFTER_PUBLISH))
        drawn.append(Fault(len(drawn), call, aimed.randrange(3), "queue dies", 0.0))
        drawn.append(Fault(len(drawn), "disk/lock", 1, "bits flip", 0.0))
    elif roll < 1 / 10:
        drawn.append(Fault(len(drawn), CALL.format(method="checkpointed"), aimed.randrange(2), "machine dies", 0.0))
    return tuple(drawn)


def _draw_fault(draw: random.Random, number: int, name: str, *, replicas: int) -> Fault:
    kind = KINDS[name]
    point = draw.choice(kind.points)
    low, high = TURNS if point.startswith("turn/") else CALL_FIRST if point == CALL else kind.first
    point = point.format(replica=f"replica-{draw.randrange(replicas)}", method=draw.choice(CALLS))
    at = low + int((high - low) * draw.random() ** 2)  # early ones more often: runs differ in length
    return Fault(number, point, at, name, round(draw.uniform(*kind.amount), 3))


SHARD_POINTS: dict[str, tuple[str, ...]] = {
    "queue dies": (
        "message/{shard}",
        "call/{shard}.{method}",
        "turn/{shard}",
        "disk/{shard}/write",
        "disk/{shard}/sync",
    ),
    "machine dies": ("call/{shard}.{method}", "disk/{shard}/write", "disk/{shard}/sync"),
    "shard hangs": ("message/{shard}", "call/{shard}.{method}"),
    "late message": ("message/{shard}", "call/{shard}.{method}"),
    "message twice": ("message/{shard}", "call/{shard}.{method}"),
    "slow disk": ("disk/{shard}/write", "disk/{shard}/sync"),
    "disk is full": ("disk/{shard}/write",),
    "bits flip": ("disk/{shard}/lock",),
}
SHARD_CALLS = ("open", "begin", "append", "whole", "contents", "settle", "sync", "read", "close_journal")


def _with_shards(draw: random.Random, faults: tuple[Fault, ...], *, shards: int) -> tuple[Fault, ...]:
    """And up to two faults of the processes that hold the content, where there are any and anything goes wrong."""
    if shards == 1 or not faults:
        return faults
    made = [_shard_fault(draw, len(faults) + i, shards=shards) for i in range(draw.choice((0, 1, 1, 2)))]
    return (*faults, *made)


def _shard_fault(draw: random.Random, number: int, *, shards: int) -> Fault:
    name = draw.choices(list(SHARD_POINTS), (6, 6, 2, 3, 4, 1, 1, 1))[0]
    point, kind = draw.choice(SHARD_POINTS[name]), KINDS[name]
    low, high = TURNS if point.startswith("turn/") else (0, 12) if point.startswith("call/") else (0, 120)
    low, high = (1, 4) if name == "bits flip" else (low, high)
    point = point.format(shard=f"queue-shard-{draw.randrange(shards)}", method=draw.choice(SHARD_CALLS))
    return Fault(
        number, point, low + int((high - low) * draw.random() ** 2), name, round(draw.uniform(*kind.amount), 3)
    )
