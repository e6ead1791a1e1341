"""The whole pipeline in one process: real queue, rollouter, publisher and recorder; fake engine and trainer."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from agent_loop.decoder import SegmentDecoder, budget_left, observe_prompt
from agent_loop.engine import SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.tools.tool import PauseGate
from async_rl.cluster.queue import QueueClient, QueueHost
from async_rl.config import CheckpointConfig, MismatchConfig, QueueConfig, SyncConfig, ValidationConfig
from async_rl.controller.checkpoints import Checkpoints, RunState
from async_rl.controller.controller import Controller
from async_rl.controller.parts import RunParts
from async_rl.controller.probe import Probe
from async_rl.controller.resume import failed_prompts
from async_rl.files.rollouts import RecordConfig
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.inference.router import ReplicaRouter
from async_rl.inference.stub import InProcess
from async_rl.inference.supervisor import SupervisionConfig, Supervisor
from async_rl.metrics.recorder import Recorder
from async_rl.metrics.trace import Trace
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.group_contents import ContentPlace, GroupContents, read_content
from async_rl.rollout.prompts import PromptSource
from async_rl.rollout.rollouter import FailureConfig, Rollouter, session_name
from async_rl.rollout.schedule import RunSchedule, ScheduleReplay
from async_rl.rollout.validator import Validator
from async_rl.rollout.worker import RolloutWorker
from async_rl.trainer.batch.advantage import AdvantageConfig
from async_rl.weights.transport import WeightUpdate
from message_queue.policies import StalenessConfig, build_policy
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
    """A FakeEngine whose control calls take their time or fail. Versions name the call at which it dies."""

    def __init__(
        self,
        script,
        *,
        fail_load: Exception | None = None,
        load_s: float = 0.0,
        die_at_load: int | None = None,
        die_after_resume: int | None = None,
        pause_s: float = 0.0,
        stillborn: bool = False,
        **options,
    ) -> None:
        super().__init__(script, **options)
        self.fail_load, self.load_s, self.pause_s = fail_load, load_s, pause_s
        self.die_at_load, self.die_after_resume = die_at_load, die_after_resume
        if stillborn:
            self.die("it did not start")

    async def pause(self):
        await asyncio.sleep(self.pause_s)
        await super().pause()

    async def resume(self):
        await super().resume()
        if self.weights.version == self.die_after_resume:
            asyncio.get_running_loop().call_later(0.02, self.die, "killed after a resume")

    async def load(self, update, *, kv="recompute"):
        if self.fail_load is not None:
            raise self.fail_load
        await asyncio.sleep(self.load_s)
        if update.weights.version == self.die_at_load:
            self.die("killed in a load")
        return await super().load(update, kv=kv)


@dataclass
class FakeTrainer(InProcess):
    """Records its batches and exports. step_s: seconds of one train call on the event loop's clock.

    wrong_about: version whose tokens it scores differently from the engine. held: version that it scores by.
    saves_slowly: whether no checkpoint is written before three batches are trained. may_end: whether a train call may;
    a harness with a probe sets it, so that each step takes longer than the answers.
    """

    step_s: float = 0.0
    fail_at: int | None = None
    wrong_about: int | None = None
    held: int = 0
    scored: list[int] = field(default_factory=list)
    batches: list = field(default_factory=list)
    exported: list[int] = field(default_factory=list)
    three_done: asyncio.Event = field(default_factory=asyncio.Event)
    saves_slowly: bool = False
    may_end: Callable[[], bool] = lambda: True

    async def train(self, batch):
        await asyncio.sleep(self.step_s)
        while not self.may_end():  # noqa: ASYNC110 - of the pipeline's state
            await asyncio.sleep(0.001)
        if self.fail_at is not None and len(self.batches) + 1 == self.fail_at:
            raise RuntimeError("rank 0 ran out of memory")
        self.batches.append(batch)
        if len(self.batches) == 3:
            self.three_done.set()
        return {"loss": 0.0, "grad_norm": 1.0, "entropy": 1.0}

    async def export(self, directory, *, version, keep_version):
        self.exported.append(version)
        return WeightUpdate(path=directory / f"weights-{version}", weights=fake_weights(version))

    async def snapshot_weights(self):
        self.held = self.exported[-1] if self.exported else 0

    async def score(self, batch):
        self.scored.append(self.held)
        wrong = 0.5 if self.held == self.wrong_about else 0.0
        return [torch.from_numpy(batch.loss_tokens(number).logprobs) - wrong for number in range(len(batch))]

    async def save(self, directory):
        self.saving = directory

    async def saved(self):
        if self.saves_slowly:
            await self.three_done.wait()
        self.saving.mkdir()


class Loop:
    """An agent loop over bare token ids, without tools. Reward: parity of the length, so that groups have variance.

    agents: name -> whether it is trained, of further agents, each with a path; the trained ones have 1 - reward.
    """

    def __init__(
        self,
        engine,
        *,
        fail=lambda prompt: None,
        reward_fail=lambda session: None,
        reward=lambda trajectory: float(len(trajectory) % 2),
        limits=LIMITS,
        turns=1,
        agents=None,
    ):
        self._agents = agents or {}
        self._engine, self._fail, self._limits, self._turns = engine, fail, limits, turns
        self._reward_fail, self._reward = reward_fail, reward

    async def run(self, prompt, *, trajectory, session, cache_salt):
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
        if (error := self._fail(prompt)) is not None:
            raise error
        reason = await decoder.decode(trajectory, max_new_tokens=budget_left(trajectory, LIMITS))
        while len(trajectory.turns) < self._turns and LIMITS.turn_budget(len(trajectory)) > 1:
            trajectory.observe(np.array([3], np.int32))
            reason = await decoder.decode(trajectory, max_new_tokens=LIMITS.turn_budget(len(trajectory)))
        if (error := self._reward_fail(session)) is not None:
            raise error
        info = {"refused_answers": float(decoder.num_refused), "length": float(len(trajectory))}
        reward = self._reward(trajectory)
        rewards = {"policy": reward} | {agent: 1 - reward for agent, trained in self._agents.items() if trained}
        for number, agent in enumerate(self._agents, start=1):
            path = trajectory.paths[number] if len(trajectory.paths) > number else trajectory.fork(turns=0)
            path.agent = agent
            if not path.turns:
                path.observe(head)
            await decoder.decode(path, max_new_tokens=4 - path.num_sampled)
        trajectory.close(
            stop_reason=reason,
            reward=sum(rewards.values()),
            info=info,
            rewards=rewards if self._agents else None,
        )


def prompt_at(index):
    return Prompt(index=index, messages=(Message(role="user", content=str(index)),), target={})


@dataclass
class Spy:
    """A console, and a tracker, that remember."""

    notes: list[str] = field(default_factory=list)
    validations: list = field(default_factory=list)

    def step(self, record): ...
    def validation(self, train_step, result):
        self.validations.append((train_step, result))

    def note(self, text, *, level=0):
        self.notes.append(text)

    def log(self, metrics, train_step): ...
    def table(self, rows, train_step): ...
    def close(self): ...


class LocalQueue(InProcess, TrajectoryQueue):
    """A queue of the process itself."""

    _drained = 0

    async def drain_records(self):
        records = await self.records_after(self._drained)
        self._drained += len(records)
        return records

    async def closing_records(self):
        return await super().closing_records(self._drained)


class WatchedQueue(QueueClient):
    """The client of a queue whose calls tests replace: `queue.take = watched`."""

    def __getattr__(self, name):
        return partial(super().call, getattr(TrajectoryQueue, name))

    async def call(self, method, /, *args, **options):
        watched = self.__dict__.get(method.__name__)
        return await (super().call(method, *args, **options) if watched is None else watched(*args, **options))


def text_of_ids(token_ids):
    """Stands for a tokenizer: the ids as text."""
    return " ".join(map(str, token_ids.tolist()))


class Harness:
    """A run whose parts a test inspects afterwards."""

    def __init__(
        self,
        directory: Path,
        *,
        steps: int = 6,
        max_staleness: int = 1,
        policy: str = "wait",
        publish_every: int = 1,
        updates_per_batch: int = 1,
        batch_groups: int = 4,
        token_s: float = 0.0,
        mean_length: int = 12,
        on_update: str = "resume",
        kv: str = "recompute",
        max_paused: int | None = None,
        staged: bool = False,
        max_failed_groups: int = 4,
        drop_without_spread: int = 0,
        order=None,
        reward=lambda trajectory: float(len(trajectory) % 2),
        validate_every: int = 0,
        trainer: FakeTrainer | None = None,
        loop_fail=lambda prompt: None,
        reward_fail=lambda session: None,
        failure: FailureConfig | None = None,
        replica_options: dict | Sequence[dict] = (),
        resume_routing: str = "append",
        validation_fail=lambda session: None,
        held_out=None,
        validation_samples=1,
        limits: TurnLimits = LIMITS,
        turns: int = 1,
        agents: Mapping[str, bool] | None = None,
        publish_timeout_s: float = 5.0,
        start: RunState | None = None,
        seed: int = 0,
        checkpoint_every: int = 2,
        journal: JournalPlace | None = None,
        supervision: SupervisionConfig | None = None,
        new_replicas: Sequence[dict] = (),
        schedule: RunSchedule | None = None,
        probe: MismatchConfig | None = None,
    ) -> None:
        self.start = start = start or RunState()
        self.directory = directory
        self.journal = journal
        self.restored = None
        script = SeededScript(seed, vocab_size=VOCAB, stop_token=STOP, mean_length=mean_length)
        each = [replica_options] if isinstance(replica_options, dict) else list(replica_options) or [{}]
        common = {"token_s": token_s, "context_length": LIMITS.max_tokens}
        self.replicas = [
            FakeReplica(script, **{**common, "version": start.param_version, "name": f"fake-{i}", **options})
            for i, options in enumerate(each)
        ]
        self.spy = Spy()
        self.pool = ReplicaPool(self.replicas, on_lost=self.spy.note)
        self.schedule_replay = replay = None if schedule is None else ScheduleReplay(schedule, session=session_name)
        order = order or prompt_at
        self.order = order if schedule is None else schedule.order(order)
        router = ReplicaRouter(self.pool)
        engine = router if replay is None else replay.engine(router)
        self.trainer = trainer or FakeTrainer()
        staleness = StalenessConfig(max_staleness=max_staleness, policy=policy)
        self.contents = GroupContents()
        self._resume_routing = resume_routing
        if journal is None:
            place = JournalPlace(directory=directory, run="flow", checkpoint=start.queue)
            state = state_of_checkpoint(place)
            options = {"batch_groups": batch_groups, "updates_per_batch": updates_per_batch}
            self.queue = LocalQueue(build_policy(staleness, **options), state=state)
        else:
            self.host = QueueHost(
                SimpleNamespace(
                    rollout=SimpleNamespace(groups_per_batch=batch_groups),
                    trainer=SimpleNamespace(updates_per_batch=updates_per_batch),
                    staleness=staleness,
                    queue=QueueConfig(),
                )
            )
            self.queue = WatchedQueue(DirectHandle(self.host), timeout_s=60.0)
        self.recorder = Recorder(directory, console=self.spy, trackers=self.spy, rollouts=RecordConfig())
        self.checkpoints = Checkpoints(directory / "checkpoints", config=CheckpointConfig(every=checkpoint_every))
        loop = Loop(
            engine, fail=loop_fail, reward_fail=reward_fail, reward=reward, limits=limits, turns=turns, agents=agents
        )
        self.wrap_roll = lambda roll: roll

        def rollouter(log):
            """A rollouter of this run, whose `roll` tests may wrap."""
            self.rollouter = Rollouter(
                loop=loop if replay is None else replay.loop(loop),
                routing=SPEC,
                trajectories_per_group=3,
                resume_routing=resume_routing,
                log=log,
                failure=failure,
                note=lambda found: self.spy.note(found.text),
                failed=lambda rollout: self.workers[0].report(rollout),
                decode=text_of_ids,
            )
            roll = self.rollouter.roll
            self.rollouter.roll = lambda *args, **options: self.wrap_roll(roll)(*args, **options)
            return self.rollouter

        validator = Validator(loop=Loop(engine, reward_fail=validation_fail), routing=SPEC, decode=str)
        self.workers = [
            RolloutWorker(
                "worker-0", rollouter=rollouter, validator=validator, gate=PauseGate(), pool=self.pool, replies_s=10
            )
        ]
        self.trace = Trace(directory / "trace.json")
        self.rollouts = Dispatcher(
            self.workers,
            pool=self.pool,
            note=self.spy.note,
            record_failed=self.recorder.failed_rollout,
            trace=self.trace,
        )
        publisher = Publisher(
            self.pool,
            on_update=on_update,
            kv=kv,
            rollouts=self.rollouts,
            max_paused=max_paused,
            staged=staged,
            timeout_s=publish_timeout_s,
            trace=self.trace,
        )
        self.config = SimpleNamespace(
            total_train_steps=steps,
            seed=0,
            output_dir=directory,
            advantage=AdvantageConfig(),
            checkpoint=CheckpointConfig(every=checkpoint_every),
            rollout=SimpleNamespace(
                max_failed_groups=max_failed_groups,
                drop_without_spread=drop_without_spread,
                kv="recompute",
                record=RecordConfig(steps=0),
                sampling=SamplingConfig(temperature=0.5),
            ),
            sync=SyncConfig(every=publish_every, timeout_s=publish_timeout_s),
            trainer=SimpleNamespace(updates_per_batch=updates_per_batch),
            validation=ValidationConfig(every=validate_every, samples=validation_samples),
        )
        found = None
        if probe is not None:
            self.trainer.may_end = self._is_probed
            found = Probe(
                self.pool,
                config=probe,
                dtypes=("float32",),
                same_experts=True,
                temperature=1.0,
                max_tokens=LIMITS.max_tokens,
                timeout_s=LIMITS.generate_timeout_s,
                routing=SPEC,
            )
        supervisor = self.pool
        if supervision is not None:
            options_of_new = iter(new_replicas)

            async def start_replica(lost, /, *, slot, name):
                made = FakeReplica(script, **{**common, "name": name, **next(options_of_new, {})})
                await made.stats()  # it may be dead from the start
                self.replicas.append(made)
                return made

            supervisor = Supervisor(self.pool, publisher, start=start_replica, config=supervision, note=self.spy.note)
        self.parts = RunParts(
            start_queue=None,
            replace_trainer=None,
            checkpoints=self.checkpoints,
            publisher=publisher,
            replicas=supervisor,
            rollouts=self.rollouts,
            routing=SPEC,
            recorder=self.recorder,
            trace=self.trace,
            weights_directory=directory / "weights",
            held_out=held_out or ({"": [prompt_at(i) for i in range(5)]} if validate_every else {}),
            schedule_replay=self.schedule_replay,
            probe=found,
        )
        if journal is None:
            self.build(PromptSource(self.order, cursor=start.prompt_cursor, unfinished=start.unfinished_prompts))

    def _is_probed(self):
        pipeline, version = self.pipeline, self.pipeline._unscored
        return version is None or (pipeline._loaded_version >= version and pipeline._probe.has_answers(version))

    def build(self, prompts: PromptSource) -> None:
        self.pipeline = Controller(
            self.config,
            self.parts,
            prompts=prompts,
            queue=self.queue,
            contents=self.contents,
            trainer=self.trainer,
            start=self.start,
            restored=self.restored,
        )

    async def open(self) -> None:
        """Open the journal and continue from it, as `RecoveryLoop` does."""
        place = ContentPlace(
            directory=self.journal.directory / "content",
            run=self.journal.run,
            fsync=False,
            trajectories=3,
            routing=SPEC,
            resume_routing=self._resume_routing,
        )
        restored = await self.queue.open(self.journal, timeout_s=60.0)
        stored = await read_content(place, restored)
        assert not (stored.incomplete or stored.notes), stored.notes
        await self.rollouts.open(place, live=restored.live)
        self.contents = GroupContents.of_restart(restored, stored, forget=self.rollouts.forget)
        self.restored = restored
        live = restored.live | restored.given_up
        self.recorder.resume_after(self.start.train_step, next_group=restored.next_group, live=live)
        self.build(
            PromptSource(
                self.order,
                cursor=restored.prompt_cursor,
                unfinished=restored.waiting,
                failed=failed_prompts(self.directory, restored),
            )
        )

    async def run(self, *, timeout_s: float = 120.0) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                if self.journal is not None:
                    await self.open()
                return await self.pipeline.run()
        finally:
            try:
                if self.journal is None or self.restored is not None:
                    self.recorder.ledger(await self.queue.closing_records())
            finally:
                self.recorder.close()
                self.trace.write()
                if self.journal is not None:
                    await self.host.close_journal()
                    await self.rollouts.end()

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
