"""The world of one seed: the real controller among simulated processes, and a run that is restarted when it breaks.

driver     RecoveryLoop, Resume, Controller, Dispatcher, Publisher, Supervisor, Recorder, Checkpoints         (real)
worker     RolloutHost, Rollouter, agent loops, router, ContentWriter (real) -> files, with faults of Disk
messages   QueueClient, BatchingClient, handles (real) -> Process (simulated: late, never)
queue      QueueHost, BatchingServer, EventJournal (real) -> SQLite files, with faults of Disk
replica    ReplicaHost, BatchingServer, RequestGate (real) -> SimulatedReplica
trainer    SimulatedTrainer; tools and reward are simulated too
watched by Oracle
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from agent_loop.programs.endpoint import server
from agent_loop.programs.program import ProgramLoop
from async_rl.cluster import build_worker
from async_rl.cluster import queue as queue_process
from async_rl.config import CheckpointConfig
from async_rl.controller import recovery as controller_recovery
from async_rl.controller.checkpoints import Checkpoints, RunState, read_run_state
from async_rl.rollout import dispatcher, group_contents, worker
from async_rl.rollout.content import writer
from async_rl.rollout.content.format import RolloutRecord
from async_rl.rollout.content.writer import ContentWriter
from async_rl.rollout.group_contents import ContentPlace, StoredContent
from async_rl.run import causes
from async_rl.simulator import model
from async_rl.simulator.agents import Endpoint, WatchedLoop, WatchedRouter, serve
from async_rl.simulator.disk import Disk, connect, pwritev
from async_rl.simulator.oracle import Oracle
from async_rl.simulator.processes import Observed, adopt, current_process
from async_rl.simulator.run import Run
from async_rl.simulator.scenario import KINDS, Fault, Scenario
from async_rl.simulator.violations import Violation, require
from async_rl.simulator.virtual_time import Deadlock, VirtualTimeLoop
from message_queue import recovery, sqlite_file
from message_queue.events import Event as QueueEvent
from message_queue.journal import EventJournal
from message_queue.recovery import JournalPlace, Restored
from message_queue.state import QueueState
from message_queue.trajectory import Admission

Event = tuple[float, str, str, tuple[object, ...]]
OPERATOR_S = 20.0  # until a run is restarted
REMOVES = ("remove the directory", "which drops its groups in flight")  # in errors of a journal that cannot be used
STANDSTILL_S = 900.0  # virtual seconds without a train step; longer than all time-outs of one train step together
STANDSTILL_TURNS = 60_000  # turns of the event loop without a train step
CLEAN_UP_TURNS = 2_000


class World:
    """One scenario, run to its end. The task with the name "world" is its own, all others are of the run.

    Args:
        directory: empty; for checkpoints, metrics and ledger.
        standstill_turns: turns of the event loop without a train step that are a standstill.
    """

    def __init__(self, scenario: Scenario, *, directory: Path, standstill_turns: int = STANDSTILL_TURNS) -> None:
        self.scenario = scenario
        self.directory = directory
        self.events: list[Event] = []
        self.violation: Violation | None = None
        self.fired: list[Fault] = []
        self.disk = Disk(self)
        self.oracle = Oracle(self)
        self.run: Run | None = None
        self.endpoints: dict[str, Endpoint] = {}  # by URL
        self.attempts: dict[str, count[int]] = defaultdict(count)  # session -> numbers of an agent's rollouts of it
        self._queue: QueueState | None = None  # of the newest process
        self._loop = loop = VirtualTimeLoop()
        self._standstill_turns = standstill_turns
        self._faults = {(fault.point, fault.at): fault for fault in scenario.faults}
        self._faults_of_turns = {fault.at: fault for fault in scenario.faults if fault.point.startswith("turn/")}
        self._passed: Counter[str] = Counter()
        self._killed = False  # the driver, until the next start
        self._refused = 0  # starts that ended with an error of the journal
        self._turn = self._cleaning = 0  # of the event loop: while a run lives; since its end began, else 0
        self._progress = (0.0, 0)
        threads = random.Random(f"threads {scenario.config.seed}")
        loop.thread_s = lambda: threads.expovariate(1.0) * scenario.latency_s + self.fault("disk/work")[1]
        loop.is_dead = self.is_dead
        loop.process = current_process
        self.block = loop.block
        loop.on_result = self._opened
        loop.on_task = adopt
        loop.on_turn = self._on_turn
        loop.set_exception_handler(lambda _loop, _context: None)

    @property
    def may_drop(self) -> bool:
        """Whether a group may have been dropped for a failed rollout by now."""
        return any(KINDS[fault.kind].drops_group for fault in self.fired)

    # ---- calls of the parts

    def fault(self, point: str) -> tuple[str, float]:
        """Kind and amount of what goes wrong at `point` this time; ("", 0.0) if nothing does."""
        at = self._passed[point]
        self._passed[point] = at + 1
        fault = self._faults.get((point, at))
        if fault is None:
            return "", 0.0
        self._happened(fault)
        return fault.kind, fault.amount

    def note(self, who: str, what: str, *details: object) -> None:
        """Write a line of the trace."""
        self.events.append((self._loop.time(), who, what, details))

    def judge(self, check: Any, *args: Any, **kwargs: Any) -> None:
        """Call a check of the oracle; the first violation ends the world."""
        try:
            check(*args, **kwargs)
        except Violation as violation:
            self.fail(violation)

    def require(self, invariant: str, holds: bool, text: str, *values: object) -> None:
        """As `violations.require`; a violation ends the world."""
        self.judge(require, invariant, holds, text, *values)

    def progressed(self) -> None:
        """A train step is made, or a run starts."""
        self._progress = (self._loop.time(), self._turn)

    def called(self, process: str, method: str, args: tuple[Any, ...], result: Any) -> None:
        """A process answered a call."""
        if process != "queue":
            return
        if method == "checkpointed":
            self.judge(self.oracle.groups.check_checkpoint, self._newest_state())
        if method == "take":
            self.oracle.taken = result.groups
        self.judge(self.oracle.groups.answered, method, args, result)

    # ---- functions that it puts in the place of others

    async def open_queue(self, place: JournalPlace, **options: Any) -> tuple[Any, EventJournal, Restored]:
        """A queue; from its start the oracle sees each event."""
        self.oracle.queue_starts(RunState() if place.checkpoint is None else self._newest_state())
        kind, _ = self.fault("disk/open")
        if kind == "bits flip":
            self.disk.damage_content(self.directory / "journal" / "content")
        elif kind == "events are damaged":
            self.disk.damage_events(self.directory / "journal")
        queue, journal, restored = await recovery.open_queue(place, **options)
        self.require("exactly once", not self.disk.damaged_events, "a damaged journal of events is opened")
        self._queue = state = queue._state  # pyright: ignore[reportPrivateUsage]
        apply = state.apply

        def watched(event: QueueEvent) -> None:
            apply(event)
            self.judge(self.oracle.followed, event, state.snapshot())

        state.apply = watched
        return Observed(queue), journal, restored

    async def read_content(self, place: ContentPlace, restored: Restored) -> StoredContent:
        """Content that a restart continues; the oracle sees it when it is complete."""
        stored = await group_contents.read_content(place, restored)
        if not stored.incomplete:
            assert self._queue is not None
            notes = (note.replace(str(self.directory), "") for note in (*restored.notes, *stored.notes))
            self.note("queue", "continues", restored.replay, len(restored.open), *notes)
            self.judge(self.oracle.reopened, restored, stored, self._queue.snapshot())
        return stored

    async def read_stored(self, place: ContentPlace, admissions: Collection[Admission]) -> StoredContent:
        """Content of the groups of a dead worker."""
        stored = await group_contents.read_stored(place, admissions)
        groups = [admission.group for admission in admissions]
        self.note("driver", "moves", *groups)
        self.judge(self.oracle.moved, groups, stored)
        return stored

    async def open_writer(self, *args: Any, **options: Any) -> ContentWriter:
        """A writer; the oracle sees each record that it stores."""
        writer = await ContentWriter.open(*args, **options)
        append = writer.append

        async def watched(records: Sequence[RolloutRecord]) -> None:
            await append(records)
            self.judge(self.oracle.groups.stored, records)

        writer.append = watched
        return writer

    def tool_called(self, session: str) -> None:
        """A tool starts."""
        self.note(session, "tool")
        process = current_process()
        assert self.run is not None and process is not None
        allowed = process.hung or not self.run.rollouts.tools_paused
        self.require("tools", allowed, "{} calls a tool in {}", session, process.process_name)
        self.oracle.session(session).tool_calls += 1

    def fail(self, violation: Violation) -> None:
        """Note the first violation and end the run."""
        if self.violation is None:
            self.violation = violation
            self.note("oracle", str(violation))
        self._kill_driver("a violation")

    def kill(self, name: str) -> None:
        """End a process, if it was started."""
        if name == "driver":
            self._kill_driver("the driver died")
        elif self.run is not None and name in self.run.processes:
            self.run.processes[name].die("killed")

    # ---- from start to end

    def run_to_end(self) -> None:
        """Run, and restart as often as something broke that was to break; a standstill is a violation."""
        try:
            with installed(self), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        except Deadlock as deadlock:
            self.violation = self.violation or Violation("progress", str(deadlock))

    async def _live(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("world")
        for start in range(self.scenario.most_starts):
            if await self._live_once(start) or self.violation is not None:
                break
        else:
            self.fail(Violation("progress", f"not done after {self.scenario.most_starts} starts"))
        self._loop.on_turn = lambda: None

    async def _live_once(self, start: int) -> bool:
        """One start of the run; True at its end or where an invariant is broken."""
        fired, disk_was_broken = len(self.fired), self.disk.is_broken or self.disk.damaged_events
        self.note("world", "start", start)
        self._cleaning, self._killed = 0, False  # a driver may have been killed when none ran
        self.progressed()
        self.oracle.driver_starts()
        self.run, done, error, self.endpoints = None, False, None, {}
        try:
            self.run = Run(self, number=start)
            done = await asyncio.create_task(self.run.go(), name="driver")
        except asyncio.CancelledError:
            error = "killed"
        except BaseException as failure:  # noqa: BLE001 - whatever ends the driver; the world goes on
            error = "; ".join(causes(failure))
        finally:
            await self._clean_up()
        self.note("world", "ended", done, error and error.replace(str(self.directory), ""))
        if self.run is not None and error is None:
            records = [json.loads(line) for line in (self.directory / "ledger.jsonl").read_text().splitlines()]
            self.judge(self.oracle.groups.check_records, records)
        elif error is not None and error != "killed":
            lost = 0 if self.run is None else len(self.run.pool.causes)
            held = self.scenario.may_end(error, fired=self.fired[fired:], lost=lost, disk_was_broken=disk_was_broken)
            self.require("failure", held, "the run failed, and nothing was broken that may end it: {}", error)
            await self._operate(error)
        if self.run is not None and done:
            self.judge(self.oracle.finish, self._newest_state(), train_step=self.run.trainer.train_step)
        return done

    async def _operate(self, error: str) -> None:
        """A person reads why the run ended: removes a damaged journal, and repairs the disk at its second error."""
        if any(text in error for text in REMOVES):
            self.require("exactly once", self.disk.damaged_events, "the journal is refused: {}", error)
            shutil.rmtree(self.directory / "journal")
            self.disk.journal_removed()
            self.oracle.journal_removed()
        self._refused += "journal" in error
        if self._refused == 2:
            self._refused = 0
            self.disk.repair()
        await asyncio.sleep(OPERATOR_S)

    def _newest_state(self) -> RunState:
        """Of the newest checkpoint."""
        latest = Checkpoints(self.directory / "checkpoints", config=CheckpointConfig()).latest()
        return RunState() if latest is None else read_run_state(latest)

    # ---- the end of a driver

    def _kill_driver(self, cause: str) -> None:
        """Stop every task where it is; what they still do on their way out reaches nobody."""
        self.note("world", "kill", cause)
        self._cut_off()

    def _cut_off(self) -> list[asyncio.Task[Any]]:
        """End the driver and its processes; returns tasks that are on their way out."""
        self._killed, self._cleaning = True, 1
        if self.run is not None:
            self.run.cut_off()
        tasks = sorted(asyncio.all_tasks(self._loop), key=hash)  # by their numbers
        left = [task for task in tasks if task.get_name() != "world"]
        for task in left:
            task.cancel()
        return left

    async def _clean_up(self) -> None:
        """End all tasks and files that a run left behind.

        Raises:
            Deadlock: they do not end.
        """
        while left := self._cut_off():
            await asyncio.wait(left)
        if self.run is not None:
            self.run.close_files()
        self._cleaning = 0

    def is_dead(self) -> bool:
        """Whether the process whose code runs now was killed."""
        process = current_process()
        return self._killed or (process is not None and process.dead)

    def _opened(self, result: object) -> None:
        """A process has the files open that work in its thread opened."""
        process = current_process()
        if isinstance(result, EventJournal | ContentWriter) and process is not None:
            process.files.append(result)

    # ---- the loop

    def _on_turn(self) -> None:
        if self._cleaning:
            self._cleaning += 1
            if self._cleaning > CLEAN_UP_TURNS:
                raise Deadlock("what a dead driver left behind does not end")
            return
        self._turn += 1
        fault = self._faults_of_turns.get(self._turn)
        if fault is not None and self.run is not None:
            self._happened(fault)
            if fault.kind == "stop is asked for":
                self.run.parts.request_stop()
            else:
                self.kill(fault.point.removeprefix("turn/"))
        since, turn = self._progress
        if self._loop.time() > since + STANDSTILL_S or self._turn > turn + self._standstill_turns:
            waited = f"{self._loop.time() - since:.0f} s and {self._turn - turn} turns of the event loop"
            self.progressed()
            self.fail(Violation("progress", f"no train step in {waited}"))

    def _happened(self, fault: Fault) -> None:
        self.fired.append(fault)
        self.note("fault", str(fault))


@contextmanager
def installed(world: World) -> Generator[None]:
    """Within it, connections and writes are those of the world's disk, and workers use the simulated model."""
    disk = world.disk
    replaced: list[tuple[ModuleType, str, object]] = [
        (sqlite_file, "sqlite3", _changed(sqlite3, connect=partial(connect, disk))),
        (writer, "os", _changed(os, pwritev=partial(pwritev, disk))),
        (writer, "FILE_BYTES", world.scenario.file_bytes),
        (controller_recovery, "read_content", world.read_content),
        (dispatcher, "read_stored", world.read_stored),
        (queue_process, "open_queue", world.open_queue),
        (worker, "ContentWriter", SimpleNamespace(open=world.open_writer)),
        (build_worker, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _path: model.SimulatedTokenizer())),
        (build_worker, "read_model_info", lambda _path: SimpleNamespace(routing=model.ROUTING, family="simulated")),
        (build_worker, "ReplicaRouter", partial(WatchedRouter, world)),
        (build_worker, "turn_reader", lambda _tokenizer, family: model.read_turn),
        (build_worker, "ProgramLoop", lambda **options: WatchedLoop(ProgramLoop(**options), world)),
        (server, "serve", partial(serve, world)),
    ]
    with ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def _changed(module: ModuleType, **functions: object) -> SimpleNamespace:
    """A module with some functions replaced."""
    return SimpleNamespace(**(vars(module) | functions))
