"""What one seed stands for: the settings of a run, how fast its parts are, and what goes wrong when."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

from async_rl.config import RunConfig, load_config
from async_rl.inference.gate import KVPolicy
from async_rl.inference.publisher import OnUpdate
from async_rl.trainer.batch.baselines import GRPO, ReinforcePlusPlus
from message_queue.trajectory import ResumeRouting

FOR_EVER_S = 1e9
Agent = Literal["program", "external"]
"""An agent program in the rollout workers, or agents outside of the run."""


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
`supervision` allows; a replica, which leaves the pool; the disk: the run stops with an error that names the journal.
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
        points=(f"turn/{W}", f"turn/{W}", f"message/{W}", *WRITES[1:], "disk/content/commit"),
        first=(0, 200),
        costs="worker",
        weight=4,
    ),
    "worker hangs": Kind(points=(f"message/{W}",), first=(0, 100), costs="worker"),
    "queue hangs": Kind(points=("message/queue", CALL), first=(0, 200), costs="part"),
    "trainer dies": Kind(points=("train", "export", "save", "saved"), first=(0, 6), costs="part", weight=2),
    "trainer fails": Kind(points=("train", "export", "save", "saved"), first=(0, 6), costs="run", weight=2),
    "replica does not start": Kind(points=("start",), first=(0, 1), weight=0.5),
    "successor dies": Kind(points=("start",), first=(0, 4), amount=(0.0, 6.0), costs="replica"),
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
    # agents
    "slow agent": Kind(points=("agent",), first=(0, 20), amount=(1.0, 60.0)),
    "agent fails": Kind(points=("agent",), first=(0, 20), drops_group=True),
    "agent makes no call": Kind(points=("agent",), first=(0, 20), drops_group=True),
    "agent never ends": Kind(points=("agent",), first=(0, 20), drops_group=True),
    # cancels, drawn apart
    "tool lets out a cancel": Kind(points=("tool",), first=(0, 20)),
    "reward lets out a cancel": Kind(points=("reward",), first=(0, 20), drops_group=True),
    "agent lets out a cancel": Kind(points=("agent",), first=(0, 20), drops_group=True),
}
OF_AGENTS = ["slow agent", "agent fails", "agent makes no call", "agent never ends"]  # drawn apart
CANCELS = [name for name in KINDS if name.endswith("lets out a cancel")]
OF_ALL = [name for name in KINDS if name not in (*OF_AGENTS, *CANCELS, "successor dies")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Settings of a run, the speed of its parts in virtual seconds, and what goes wrong."""

    config: RunConfig
    """Settings, except the directory and the task."""
    agent: Agent | None
    """Who makes the rollouts; None for an agent loop with a tool."""
    file_bytes: int
    """Bytes of a data file of the content, before the next file is started."""
    latency_s: float
    """Mean seconds of a message, one way."""
    token_s: tuple[float, ...]
    """Seconds of each replica for one token of a request."""
    train_s: float
    """Seconds for a batch."""
    load_s: float
    """Seconds that an engine takes to load weights."""
    tool_s: float
    """Seconds of a tool or a reward."""
    blocks: bool
    """Whether these block a thread."""
    faults: tuple[Fault, ...]
    """In the order in which they were drawn."""

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
            lost: replicas, with those that did not start.
            disk_was_broken: when it was started.
        """
        max_restarts = self.config.supervision.max_restarts
        costs = Counter(KINDS[fault.kind].costs for fault in fired)
        return bool(
            costs["run"]
            or (lost >= len(self.token_s) * (max_restarts + 1) and "replicas are lost" in error)
            or costs["part"] > max_restarts
            or costs["worker"] >= self.config.rollout.workers * (max_restarts + 1)
            or ("journal" in error and (disk_was_broken or costs["disk"]))
        )


@cache
def _template() -> RunConfig:
    return load_config(
        [
            "name=simulated", "resume=auto", "mismatch.prompts=0", "trainer.router_replay=R3", "sync.timeout_s=30",
            "queue.timeout_s=30", "cluster.start_timeout_s=60", "rollout.limits.generate_timeout_s=200",
            "rollout.limits.tool_timeout_s=5", "rollout.limits.reward_timeout_s=5", "rollout.failure.max_retries=0",
            "rollout.limits.agent_timeout_s=500", "rollout.max_failed_groups=1000000000",
            "validation.every=1", "validation.prompts=0",
        ]
    )  # fmt: skip


def run_config(settings: Mapping[str, Any]) -> RunConfig:
    """The config of a simulated run with `settings`, by their dotted names."""

    def changed(config: Any, settings: Mapping[str, Any]) -> Any:
        direct = {name: value for name, value in settings.items() if "." not in name}
        parts: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            part, dot, within = name.partition(".")
            if dot:
                parts.setdefault(part, {})[within] = value
        return replace(config, **direct, **{part: changed(getattr(config, part), parts[part]) for part in parts})

    return changed(_template(), settings)


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
    steps, group_size = draw.randint(2, 6) * per_batch, draw.randint(1, 3)
    max_staleness = draw.choice((0, 1, 1, 2, 4)) * per_batch + publish_every - 1 + beyond_batches
    policy = policies.choice((draw.choice(("wait", "drop")), "recycle", "mask"))
    max_requeues = policies.choice((1, 1, 3))
    max_paused = random.Random(f"publishes {seed}").choice((None, 1, replicas - 1)) if replicas > 1 else None
    staged = max_paused is None and random.Random(f"staging {seed}").random() < 0.4
    settings = {
        "seed": seed,
        "total_train_steps": steps,
        "trainer.updates_per_batch": per_batch,
        "sync.every": publish_every,
        **({"sync.mode": "rolling", "sync.max_paused": max_paused} if max_paused is not None else {}),
        **({"sync.mode": "staged"} if staged else {}),
        "engine.replicas": replicas,
        "advantage": ReinforcePlusPlus() if group_size == 1 else GRPO(),
        "staleness.max_staleness": max_staleness,
        "staleness.policy": policy,
        **({"staleness.max_requeues": max_requeues} if policy == "recycle" else {}),
        "rollout.workers": workers,
        "rollout.groups_per_batch": batch_groups,
        "rollout.trajectories_per_group": group_size,
        "rollout.failure.on_failed": policies.choice(("drop", "drop", "fill")),
        "rollout.drop_without_spread": random.Random(f"spread {seed}").choice((0, 0, 1, 4)) if group_size > 1 else 0,
        "rollout.on_update": on_update,
        "rollout.kv": draw.choice(get_args(KVPolicy)) if on_update == "keep" else "recompute",
        "rollout.resume_routing": draw.choice(("append", "append", *get_args(ResumeRouting))),
        "rollout.sampling.top_p": 0.9 if seed % 6 == 5 else 1.0,
        "queue.max_ready": draw.choice((None, None, batch_groups, batch_groups + 2)),
        "rollout.limits.max_turns": draw.randint(1, 4),
        "rollout.limits.max_tokens": draw.choice((16, 32, 48)),
        "checkpoint.every": draw.choice((0, 1, 1, 2)),
        "validation.prompts": 2 if draw.random() < 0.2 else 0,
    }
    agent, of_agent = _draw_agent(seed, most_steps=min(steps, 3 * per_batch))
    settings |= of_agent
    return Scenario(
        agent=agent,
        file_bytes=draw.choice((1 << 10, 1 << 13, 1 << 20)),
        config=run_config({**settings, "supervision.max_restarts": draw.choice((0, 1, 3, 3))}),
        latency_s=draw.choice((0.0005, 0.005, 0.05)),
        token_s=tuple(draw.choice((0.002, 0.02, 0.1)) for _ in range(replicas)),
        train_s=draw.choice((0.01, 0.3, 2.0)),
        load_s=draw.choice((0.01, 0.2, 1.0)),
        tool_s=draw.choice((0.01, 0.3)),
        blocks=random.Random(f"threads of user code {seed}").random() < 0.5,
        faults=_draw_faults(draw, seed, replicas=replicas, workers=workers, agents=agent is not None) if faults else (),
    )


def _draw_agent(seed: int, *, most_steps: int) -> tuple[Agent | None, dict[str, Any]]:
    """Kind of agent, and its settings."""
    draw = random.Random(f"agents {seed}")
    agent: Agent | None = draw.choice((*[None] * 21, "program", "program", "external"))
    if agent is None:
        return None, {}
    return agent, {
        "total_train_steps": most_steps,  # of sessions with several paths, fewer are enough
        "rollout.limits.max_turns": draw.randint(2, 10),
        "rollout.limits.max_tokens": draw.choice((32, 64, 96)),
        "rollout.failure.max_retries": draw.choice((0, 0, 1)),
    }


def _draw_faults(draw: random.Random, seed: int, *, replicas: int, workers: int, agents: bool) -> tuple[Fault, ...]:
    """None for one seed in nine, else up to eight; for one in ten, one restart after the other.

    Two for one seed in sixteen in which a step is missing after its weights were published. At most one of agents, and
    three of successors.
    """
    storm = draw.random() < 0.1
    names = list(STORM) if storm else OF_ALL
    weights, drawn = [KINDS[name].weight for name in names], list[Fault]()

    def add(chance: random.Random, name: str) -> None:
        drawn.append(_draw_fault(chance, len(drawn), name, replicas=replicas, workers=workers))

    for _ in range(5 if storm else draw.choice((0, 1, 1, 2, 3, 4, 6, 8))):
        add(draw, draw.choices(names, weights)[0])
    aimed = random.Random(f"damage {seed}")
    if aimed.random() < 1 / 16:
        call = CALL.format(method=aimed.choice(AFTER_PUBLISH))
        drawn.append(Fault(len(drawn), call, aimed.randrange(3), "queue dies", 0.0))
        drawn.append(Fault(len(drawn), "disk/open", 1, "bits flip", 0.0))
    successors = random.Random(f"successors {seed}")
    if any(KINDS[fault.kind].costs == "replica" for fault in drawn) and successors.random() < 1 / 2:
        for _ in range(successors.randint(1, 3)):
            add(successors, "successor dies")
    apart = (("faults of agents", OF_AGENTS, 0.5 if agents else 0.0), ("cancels of user code", CANCELS, 0.3))
    for label, kinds, share in apart:
        chance = random.Random(f"{label} {seed}")
        if chance.random() < share:
            add(chance, chance.choice(kinds))
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
