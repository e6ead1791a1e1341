"""The whole pipeline in one process: real queue, rollouter, publisher and recorder; fake engine and trainer."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from agent_loop.decoder import SegmentDecoder, budget_left, observe_prompt
from agent_loop.engine import SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.tools.tool import PauseGate
from async_rl.cluster.queue import QueueClient, QueueHost
from async_rl.controller.checkpoints import Checkpoints, RunState
from async_rl.controller.controller import Controller
from async_rl.controller.parts import RunParts
from async_rl.controller.probe import Probe
from async_rl.controller.recovery import RecoveryLoop, supervised
from async_rl.controller.resume import Resume
from async_rl.files.rollouts import RecordConfig
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.router import ReplicaRouter
from async_rl.inference.supervisor import SupervisionConfig
from async_rl.metrics.recorder import Recorder
from async_rl.metrics.trace import Trace
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.group_contents import GroupContents
from async_rl.rollout.prompts import PromptSource
from async_rl.rollout.rollouter import FailureConfig, Rollouter, session_name
from async_rl.rollout.schedule import RunSchedule, ScheduleReplay
from async_rl.rollout.validator import Validator
from async_rl.rollout.worker import RolloutWorker
from async_rl.simulator.scenario import run_config
from async_rl.simulator.standins import LocalQueue, ScriptedTrainer
from message_queue.policies import build_policy
from message_queue.queue import TrajectoryQueue
from message_queue.recovery import JournalPlace, state_of_checkpoint
from tests.helpers.dense import behaviour_logprobs, param_versions
from tests.helpers.fakes import SPEC, FakeEngine, SeededScript, fake_logprob, fake_weights, true_rows

STOP = 1
VOCAB = 40
LIMITS = TurnLimits(max_turns=1, max_tokens=60, generate_timeout_s=30)


class DirectHandle:
    """A QueueHost of the same event loop, called like an actor."""

    def __init__(self, host: QueueHost) -> None:
        self._host = host

    def __getattr__(self, name):
        method = getattr(self._host, name)
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))


class FakeReplica(FakeEngine):
    """A FakeEngine whose loads take their time or fail; it dies at the load of version `die_at_load`."""

    def __init__(
        self,
        script,
        *,
        fail_load: Exception | None = None,
        load_s: float = 0.0,
        die_at_load: int | None = None,
        **options,
    ) -> None:
        super().__init__(script, **options)
        self.fail_load, self.load_s, self.die_at_load = fail_load, load_s, die_at_load

    async def _on_load(self, weights, kv, *, seconds):
        if self.fail_load is not None:
            raise self.fail_load
        await super()._on_load(weights, kv, seconds=seconds)
        if weights.version == self.die_at_load:
            self.die("killed in a load")


class FakeTrainer(ScriptedTrainer):
    """Records its batches and exports.

    Args:
        step_s: seconds of one train call on the event loop's clock.
        fail_at: batch that fails, from 1.
        wrong_about: version whose tokens it scores differently from the engine.
        saves_slowly: whether no checkpoint is written before three batches are trained.

    Attributes:
        may_end: whether a train call may; a harness with a probe sets it, so that each step takes longer than the
            answers.
    """

    def __init__(self, *, step_s=0.0, fail_at=None, wrong_about=None, saves_slowly=False) -> None:
        self.train_s, self.fail_at, self.wrong_about, self.saves_slowly = step_s, fail_at, wrong_about, saves_slowly
        self.held = 0  # version that it scores by
        self.scored, self.batches, self.exported = [], [], []
        self.three_done = asyncio.Event()
        self.may_end: Callable[[], bool] = lambda: True

    async def train(self, batch):
        metrics = await super().train(batch)
        while not self.may_end():  # noqa: ASYNC110 - of the pipeline's state
            await asyncio.sleep(0.001)
        if self.fail_at is not None and len(self.batches) + 1 == self.fail_at:
            raise RuntimeError("rank 0 ran out of memory")
        self.batches.append(batch)
        if len(self.batches) == 3:
            self.three_done.set()
        return metrics

    def _weights(self, version):
        self.exported.append(version)
        return fake_weights(version)

    async def snapshot_weights(self):
        self.held = self.exported[-1] if self.exported else 0

    async def score(self, batch):
        self.scored.append(self.held)
        wrong = 0.5 if self.held == self.wrong_about else 0.0
        return [scores - wrong for scores in await super().score(batch)]

    async def saved(self):
        if self.saves_slowly:
            await self.three_done.wait()
        await super().saved()


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Behaviour of the agent loop. Functions that end in `fail` return the error to raise, or None."""

    loop_fail: Callable = lambda prompt: None
    """Called with each prompt."""
    reward_fail: Callable = lambda session: None
    """Called with each session before its reward."""
    validation_fail: Callable = lambda session: None
    """The same for held-out prompts."""
    reward: Callable = lambda trajectory: float(len(trajectory) % 2)
    """Reward of a trajectory; by default the parity of its length, so that groups have variance."""
    turns: int = 1
    """Turns of a trajectory."""
    agents: Mapping[str, bool] | None = None
    """Name -> whether it is trained, of further agents, each with a path; the trained ones have 1 - reward."""


class Loop:
    """An agent loop over bare token ids, without tools."""

    def __init__(self, engine, rollouts: Rollouts, *, limits=LIMITS):
        self._engine, self._rollouts, self._limits = engine, rollouts, limits

    async def run(self, prompt, *, trajectory, session, cache_salt):
        rollouts, agents = self._rollouts, self._rollouts.agents or {}
        decoder = SegmentDecoder(
            self._engine,
            sampling=SamplingConfig(),
            stop_token_ids=(STOP,),
            session=session,
            cache_salt=cache_salt,
            limits=self._limits,
        )
        head = np.array([2 + prompt.index % 30, 2 + zlib.crc32(session.encode()) % 30], np.int32)
        observe_prompt(trajectory, head, index=prompt.index, limits=LIMITS)
        if (error := rollouts.loop_fail(prompt)) is not None:
            raise error
        reason = await decoder.decode(trajectory, max_new_tokens=budget_left(trajectory, LIMITS))
        while len(trajectory.turns) < rollouts.turns and LIMITS.turn_budget(len(trajectory)) > 1:
            trajectory.observe(np.array([3], np.int32))
            reason = await decoder.decode(trajectory, max_new_tokens=LIMITS.turn_budget(len(trajectory)))
        if (error := rollouts.reward_fail(session)) is not None:
            raise error
        info = {"refused_answers": float(decoder.num_refused), "length": float(len(trajectory))}
        reward = rollouts.reward(trajectory)
        rewards = {"policy": reward} | {agent: 1 - reward for agent, trained in agents.items() if trained}
        for number, agent in enumerate(agents, start=1):
            path = trajectory.paths[number] if len(trajectory.paths) > number else trajectory.fork(turns=0)
            path.agent = agent
            if not path.turns:
                path.observe(head)
            await decoder.decode(path, max_new_tokens=4 - path.num_sampled)
        trajectory.close(
            stop_reason=reason,
            reward=sum(rewards.values()),
            info=info,
            rewards=rewards if agents else None,
        )


def prompt_at(index):
    return Prompt(index=index, messages=(Message(role="user", content=str(index)),), target={})


@dataclass
class Spy:
    """A console, and a tracker, that remember."""

    notes: list[str] = field(default_factory=list)

    def step(self, record): ...
    def validation(self, train_step, result): ...
    def note(self, text, *, level=0):
        self.notes.append(text)

    def log(self, metrics, train_step): ...
    def table(self, rows, train_step): ...
    def close(self): ...


class WatchedQueue(QueueClient):
    """The client of a queue whose calls tests replace: `queue.take = watched`. restored: what it has opened."""

    restored = None

    def __getattr__(self, name):
        return partial(super().call, getattr(TrajectoryQueue, name))

    async def call(self, method, /, *args, **options):
        watched = self.__dict__.get(method.__name__)
        return await (super().call(method, *args, **options) if watched is None else watched(*args, **options))

    async def open(self, place, *, timeout_s):
        self.restored = await super().open(place, timeout_s=timeout_s)
        return self.restored

    def kill(self):
        """Its host is of this process."""


def text_of_ids(token_ids):
    """Stands for a tokenizer: the ids as text."""
    return " ".join(map(str, token_ids.tolist()))


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Engines of a run, and the tokens that they sample."""

    replica_options: dict | Sequence[dict] = ()
    """Options of each FakeReplica; a dict for a single one."""
    token_s: float = 0.0
    """Seconds per token."""
    mean_length: int = 12
    """Mean of the tokens of a turn."""
    seed: int = 0
    """Seed of the tokens."""

    def replica(self, name: str, options: dict, *, version: int = 0) -> FakeReplica:
        script = SeededScript(self.seed, vocab_size=VOCAB, stop_token=STOP, mean_length=self.mean_length)
        common = {"token_s": self.token_s, "context_length": LIMITS.max_tokens, "version": version, "name": name}
        return FakeReplica(script, **{**common, **options})

    def first(self, version: int) -> list[FakeReplica]:
        """The replicas that a run starts with."""
        one = isinstance(self.replica_options, dict)
        each = [self.replica_options] if one else list(self.replica_options) or [{}]
        return [self.replica(f"fake-{number}", options, version=version) for number, options in enumerate(each)]


SETTINGS = {
    "steps": "total_train_steps",
    "policy": "staleness.policy",
    "max_staleness": "staleness.max_staleness",
    "publish_every": "sync.every",
    "publish_timeout_s": "sync.timeout_s",
    "max_paused": "sync.max_paused",
    "updates_per_batch": "trainer.updates_per_batch",
    "batch_groups": "rollout.groups_per_batch",
    "on_update": "rollout.on_update",
    "kv": "rollout.kv",
    "max_failed_groups": "rollout.max_failed_groups",
    "drop_without_spread": "rollout.drop_without_spread",
    "failure": "rollout.failure",
    "limits": "rollout.limits",
    "resume_routing": "rollout.resume_routing",
    "validate_every": "validation.every",
    "checkpoint_every": "checkpoint.every",
    "supervision": "supervision",
    "probe": "mismatch",
}
"""Short name of a setting -> its name in a run's config."""
DEFAULTS = {
    "total_train_steps": 6,
    "staleness.max_staleness": 1,
    "sync.timeout_s": 5.0,
    "rollout.groups_per_batch": 4,
    "rollout.trajectories_per_group": 3,
    "rollout.max_failed_groups": 4,
    "rollout.failure": FailureConfig(),
    "rollout.limits": LIMITS,
    "rollout.record": RecordConfig(steps=0),
    "rollout.sampling": SamplingConfig(temperature=0.5),
    "validation.every": 0,
    "validation.prompts": 5,
    "checkpoint.every": 2,
    "journal.fsync": False,
    "supervision": SupervisionConfig(max_restarts=0),
}


def group_of(kind, options: dict):
    """The options of a group, which are taken out of `options`."""
    return kind(**{field.name: options.pop(field.name) for field in fields(kind) if field.name in options})


class Harness:
    """A run whose parts a test inspects afterwards.

    Args:
        journal: whether the run has a journal, and continues the one of its directory.
        start: checkpoint of a run without a journal.
        schedule: that the run keeps to.
        options: fields of Engines and Rollouts, and keys of SETTINGS.
    """

    def __init__(
        self,
        directory: Path,
        *,
        trainer: FakeTrainer | None = None,
        order=None,
        start: RunState | None = None,
        journal: bool = False,
        schedule: RunSchedule | None = None,
        **options,
    ) -> None:
        engines, rollouts = group_of(Engines, options), group_of(Rollouts, options)
        if "max_paused" in options:
            options["sync.mode"] = "rolling"
        count = 1 if isinstance(engines.replica_options, dict) else max(1, len(engines.replica_options))
        settings = {SETTINGS.get(name, name): value for name, value in options.items()}
        place = {"output_dir": directory, "engine.replicas": count}
        self.config = config = run_config({**DEFAULTS, **place, **settings})
        self.directory = directory
        self.resume = Resume(config) if journal else None
        self.start = start or (self.resume.state if journal else RunState())
        self.replicas = engines.first(self.start.param_version)
        self.spy = Spy()
        self.pool = ReplicaPool(self.replicas, on_lost=self.spy.note)
        self.schedule_replay = None if schedule is None else ScheduleReplay(schedule, session=session_name)
        order = order or prompt_at
        order = order if schedule is None else schedule.order(order)
        self.trainer = trainer or FakeTrainer()
        self.queue = self._queue()
        self.recorder = Recorder(directory, console=self.spy, trackers=self.spy, rollouts=RecordConfig())
        self.checkpoints = Checkpoints(directory / "checkpoints", config=config.checkpoint)
        self.wrap_roll = lambda roll: roll
        self.workers = [self._worker(rollouts)]
        self.trace = Trace(directory / "trace.json")
        self.rollouts = Dispatcher(
            self.workers,
            pool=self.pool,
            note=self.spy.note,
            record_failed=self.recorder.failed_rollout,
            trace=self.trace,
        )
        self._engines = engines
        publisher, supervisor = supervised(
            config, self.pool, rollouts=self.rollouts, start=self._start_replica, note=self.spy.note, trace=self.trace
        )
        self.parts = RunParts(
            start_queue=self.start_queue,
            replace_trainer=None,
            checkpoints=self.checkpoints,
            publisher=publisher,
            replicas=supervisor,
            rollouts=self.rollouts,
            routing=SPEC,
            recorder=self.recorder,
            trace=self.trace,
            weights_directory=directory / "weights",
            held_out={"": [prompt_at(i) for i in range(5 if config.validation.every else 0)]},
            schedule_replay=self.schedule_replay,
            probe=self._probe(),
        )
        self.pipeline = self._pipeline(order)

    # ---- parts

    def _queue(self):
        config = self.config
        if self.resume is not None:
            return WatchedQueue(DirectHandle(QueueHost(config)), timeout_s=60.0)
        groups, per_batch = config.rollout.groups_per_batch, config.trainer.updates_per_batch
        policy = build_policy(config.staleness, batch_groups=groups, updates_per_batch=per_batch)
        place = JournalPlace(directory=self.directory, run="flow", checkpoint=self.start.queue)
        return LocalQueue(policy, state=state_of_checkpoint(place))

    def _worker(self, rollouts: Rollouts) -> RolloutWorker:
        config, router, replay = self.config, ReplicaRouter(self.pool), self.schedule_replay
        engine = router if replay is None else replay.engine(router)
        loop = Loop(engine, rollouts, limits=config.rollout.limits)

        def rollouter(log):
            """A rollouter of this run, whose `roll` tests may wrap."""
            self.rollouter = Rollouter(
                loop=loop if replay is None else replay.loop(loop),
                routing=SPEC,
                trajectories_per_group=config.rollout.trajectories_per_group,
                resume_routing=config.rollout.resume_routing,
                log=log,
                failure=config.rollout.failure,
                note=lambda found: self.spy.note(found.text),
                failed=lambda rollout: self.workers[0].report(rollout),
                decode=text_of_ids,
            )
            roll = self.rollouter.roll
            self.rollouter.roll = lambda *args, **options: self.wrap_roll(roll)(*args, **options)
            return self.rollouter

        validator = Validator(
            loop=Loop(engine, Rollouts(reward_fail=rollouts.validation_fail)), routing=SPEC, decode=str
        )
        return RolloutWorker(
            "worker-0", rollouter=rollouter, validator=validator, gate=PauseGate(), pool=self.pool, replies_s=10
        )

    async def _start_replica(self, lost, /, *, slot, name):
        self.replicas.append(self._engines.replica(name, {}))
        return self.replicas[-1]

    def _probe(self) -> Probe | None:
        if not self.config.mismatch.prompts:
            return None
        self.trainer.may_end = self._is_probed
        return Probe(
            self.pool,
            config=self.config.mismatch,
            dtypes=("float32",),
            same_experts=True,
            temperature=1.0,
            max_tokens=LIMITS.max_tokens,
            timeout_s=LIMITS.generate_timeout_s,
            routing=SPEC,
        )

    def _is_probed(self):
        pipeline, version = self.pipeline, self.pipeline._unscored
        return version is None or (pipeline._loaded_version >= version and pipeline._probe.has_answers(version))

    def _pipeline(self, order) -> Controller | RecoveryLoop:
        """The run: with a journal as the launcher makes it, without one only its stages."""
        if self.resume is not None:
            return RecoveryLoop(self.config, self.parts, order=order, resume=self.resume)
        return Controller(
            self.config,
            self.parts,
            prompts=PromptSource(order, cursor=self.start.prompt_cursor, unfinished=self.start.unfinished_prompts),
            queue=self.queue,
            contents=GroupContents(),
            trainer=self.trainer,
            start=self.start,
        )

    async def start_queue(self):
        """See `async_rl.controller.parts.RunParts`."""
        return self.queue

    # ---- the run

    @property
    def restored(self):
        """What the run continued from; None if it died before it had read the journal, or has none."""
        return getattr(self.queue, "restored", None)

    async def run(self, *, timeout_s: float = 120.0) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                if isinstance(self.pipeline, RecoveryLoop):
                    return await self.pipeline.run(self.trainer)
                try:
                    return await self.pipeline.run()
                finally:
                    self.recorder.ledger(await self.queue.closing_records())
        finally:
            self.recorder.close()
            self.trace.write()

    def lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.directory / name).read_text().splitlines()]

    def groups(self, outcome: str) -> list[dict]:
        """Ledger records of the groups that ended like this."""
        return [line for line in self.lines("ledger.jsonl")[:-1] if line["outcome"] == outcome]

    def check_ledger(self) -> dict:
        """Each group has one record; returns the total."""
        *groups, total = self.lines("ledger.jsonl")
        assert total["error"] == total["token_error"] == 0
        assert total["admitted"] == len(groups) == total["trained"] + total["dropped"] + total["open"]
        assert sorted(g["group"] for g in groups) == list(range(len(groups)))
        assert {g["outcome"] for g in groups} <= {"trained", "dropped", "open"}
        assert all(bool(g["kind"]) == bool(g["reason"]) == (g["outcome"] == "dropped") for g in groups)
        return total

    def check_staleness(self, most: int) -> list[dict]:
        """No step has staler tokens, and the ledger closes after each; returns the metrics."""
        steps = self.lines("metrics.jsonl")
        assert all(s["staleness/max"] <= most and s["ledger/error"] == s["ledger/token_error"] == 0 for s in steps)
        return steps


def check_trained(trajectories) -> None:
    """Every token is one that an engine sampled, with its logprob and its rows."""
    for trajectory in trajectories:
        tokens, versions = trajectory.token_ids(), param_versions(trajectory)
        logprobs = [
            fake_logprob(int(token), at, int(version)) if version >= 0 else 0.0
            for at, (token, version) in enumerate(zip(tokens, versions, strict=True))
        ]
        np.testing.assert_allclose(behaviour_logprobs(trajectory), logprobs, rtol=1e-6)
        assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()
