"""The world of one seed: the real pipeline among simulated processes, and a run that is started again when it breaks.

driver     Lives, Resume, Pipeline, Rollouter, agent loops, Publisher, Supervisor, Recorder, Checkpoints   (real)
messages   QueueClient, BatchingClient, ReplicaHandle (real) -> Process (simulated: late, never)
queue      QueueHost, BatchingServer, EventJournal (real) -> SQLite files, with faults of Disk
content    ContentWriter, read_groups (real, in the driver) -> the same
replica    ReplicaHost, BatchingServer, RequestGate (real) -> SimulatedReplica
trainer    SimulatedTrainer; tools and reward are simulated too
watched by Oracle
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.chat import Chat
from agent_loop.engine import GenerateRequest
from agent_loop.loop import Message, Prompt
from agent_loop.tools import describe_tool
from async_rl.batch.training_batch import TrainingBatch
from async_rl.rollout.contents import StoredContent
from async_rl.run import causes
from async_rl.simulate import model
from async_rl.simulate.disk import Disk
from async_rl.simulate.engine import Answered
from async_rl.simulate.journal_watch import OPERATOR_S, JournalWatch, drops_are_excused, may_end, most_starts
from async_rl.simulate.oracle import Oracle
from async_rl.simulate.processes import Closes, current_process
from async_rl.simulate.run import Run
from async_rl.simulate.scenario import Fault, Scenario
from async_rl.simulate.trainer import LookupTool, session_of_task
from async_rl.simulate.turns import Turns
from async_rl.simulate.violations import Violation
from async_rl.simulate.virtual_time import Deadlock, VirtualTimeLoop
from message_queue.content import _Files  # pyright: ignore[reportPrivateUsage]
from message_queue.contract import Batch
from message_queue.events import Event as QueueEvent
from message_queue.journal import EventStore
from message_queue.recovery import JournalPlace, Restored
from message_queue.tokens import Int32Array, WeightVersion
from message_queue.trajectory import Trajectory

Event = tuple[float, str, str, tuple[object, ...]]


class World:
    """One scenario, run to its end.

    Args:
        directory: empty; for checkpoints, metrics and ledger.
        loop: the virtual-time loop that it will run on.
    """

    def __init__(self, scenario: Scenario, *, directory: Path, loop: VirtualTimeLoop) -> None:
        self.scenario = scenario
        self.directory = directory
        self.events: list[Event] = []
        self.violation: Violation | None = None
        self.fired: list[Fault] = []
        self.tool = LookupTool(self)
        self.chat = Chat(model.SimulatedTokenizer(), end_of_turn="<end>", tools=[describe_tool(self.tool)])
        self.oracle = Oracle(
            scenario, expected_prompt=self.prompt_ids, excused=drops_are_excused(self.fired), serving=self._serving
        )
        self.run: Run | None = None
        self.told = self.oracle.told
        self.disk = Disk(self, seed=scenario.seed, clock=loop.time)
        self._journal = JournalWatch(scenario, oracle=self.oracle, disk=self.disk, directory=directory)
        self._loop = loop
        self._faults = {(fault.point, fault.at): fault for fault in scenario.faults}
        self._passed: Counter[str] = Counter()
        self._turns = Turns(loop, scenario, happens=self._fault_of_turn, stands_still=self._stands_still)
        threads = random.Random(f"threads {scenario.seed}")
        loop.thread_s = lambda: threads.expovariate(1.0) * scenario.latency_s + self._slow_disk_s()
        loop.is_dead = self._is_dead
        loop.on_result = self._opened
        self._killed = False  # the driver, until the next start
        self._files: list[Closes] = []
        loop.set_exception_handler(lambda _loop, _context: None)

    # ---- what the parts ask and tell

    def fault(self, point: str) -> Fault | None:
        """What goes wrong at `point` this time."""
        at = self._passed[point]
        self._passed[point] = at + 1
        fault = self._faults.get((point, at))
        if fault is not None:
            self._happened(fault)
        return fault

    def note(self, who: str, what: str, *details: object) -> None:
        """Write a line of the trace."""
        self.events.append((self._loop.time(), who, what, details))

    def weights(self, digest: str) -> model.Weights:
        return self.oracle.weights(digest)

    def answered(self, answer: Answered) -> None:
        self.note(answer.session, "answered", answer.request, answer.start, answer.tokens)
        self.oracle.answered(answer)

    def loaded_by(self, replica: str, weights: WeightVersion) -> None:
        self.note(replica, "loaded", weights.version)
        self.judge(self.oracle.loaded_by, replica, weights)

    def exported(self, weights: WeightVersion, *, updates: int) -> None:
        self.judge(self.oracle.exported, weights, updates=updates)

    def trained(self, train_step: int, digest: str) -> None:
        self.judge(self.oracle.trained_to, train_step, digest)

    def tool_called(self) -> None:
        self.note(session_of_task.get(), "tool")
        process = current_process()
        if self.run is not None and self.run.rollouts.tools_paused and not (process is None or process.hung):
            self.fail(Violation("tools", f"{session_of_task.get()} calls a tool in {process.process_name}"))
        self.oracle.tool_called(session_of_task.get())

    def forced(self, request: GenerateRequest) -> None:
        """An engine is asked to go on. Rows that it is made to use are rows that some version gave."""
        self.judge(self.oracle.asked, request.session, tokens=len(request.token_ids))
        if request.forced_experts is None:
            return
        contexts = model.contexts(request.token_ids.tolist())
        every = [self.oracle.weights(digest) for digest in self.oracle.forced_digests()]
        for context, row in zip(contexts, request.forced_experts.experts.tolist(), strict=False):
            if not any(row == weights.row(context) for weights in every):
                self.fail(Violation("rows", f"{request.request_id} forces a row that no version gave: {row}"))

    def called(self, process: str, method: str, args: tuple[Any, ...], result: Any) -> None:
        """A process answered a call."""
        if process == "queue" and method == "checkpointed":
            assert self.run is not None
            self.judge(self.oracle.checkpointed, self._journal.newest_state(), self.run.records())

    def applied(self, event: QueueEvent) -> None:
        """The state of the queue followed an event."""
        assert self.run is not None
        if self._journal.is_opening:
            return
        state = self.run.queue_state()
        self.judge(self.oracle.ended, self.run.untold_records())
        self.judge(self.oracle.admitted, state.unfinished)
        self.judge(self.oracle.queue_followed, event)
        self.judge(self.oracle.check_ledger, state)

    def queue_starts(self, journal: JournalPlace) -> None:
        """A queue is about to open its journal."""
        self._journal.queue_starts(journal)

    def journal_opens(self) -> None:
        """The process of the queue opens the files."""
        fault = self.fault("disk/open")
        if fault is not None and fault.kind == "bits flip":
            self.disk.flip_a_bit(self.directory / "journal")

    def reopened(self, restored: Restored, stored: StoredContent) -> None:
        """A queue has opened its journal, and the driver has read the content of its groups."""
        assert self.run is not None
        notes = (note.replace(str(self.directory), "") for note in (*restored.notes, *stored.notes))
        self.note("queue", "continues", restored.replay, len(restored.open), *notes)
        self.judge(self.oracle.ended, self.run.untold_records())
        self.judge(self._journal.reopened, restored, stored, self.run.queue_state())

    def moved(self, groups: Mapping[int, Sequence[Trajectory]]) -> None:
        """The driver has read what is stored of the groups of a dead worker."""
        self.note("driver", "moves", *groups)
        self.judge(self.oracle.moved, groups, damaged=self.disk.damaged_groups)

    def before_queue_ends(self) -> None:
        """A queue is about to be killed by the driver."""
        assert self.run is not None
        self._remember(self.run)

    def taken(self, batch: Batch) -> None:
        """The driver got a batch."""
        self.note("driver", "takes", *(g.group for g in batch.groups))
        self.oracle.taken(batch)

    def check_batch(self, batch: TrainingBatch, *, train_step: int) -> None:
        """The trainer is about to train."""
        self.judge(self.oracle.check_batch, batch, train_step=train_step)
        self._turns.progress()

    def judge(self, check: Any, *args: Any, **kwargs: Any) -> None:
        """Call a check of the oracle; the first violation ends the world."""
        try:
            check(*args, **kwargs)
        except Violation as violation:
            self.fail(violation)

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

    # ---- prompts

    def train_prompt(self, index: int) -> Prompt:
        return Prompt(index=index, messages=(Message(role="user", content=f"{index:03d}"),))

    def prompt_ids(self, index: int) -> Int32Array:
        """int32 [n], what a trajectory of prompt `index` starts with."""
        return np.array(model.SimulatedTokenizer().encode(f"<user>{index:03d}<end><assistant>"), np.int32)

    # ---- from start to end

    async def live(self) -> None:
        """Run, and run again as often as something broke that was to break."""
        for start in range(starts := most_starts(self.scenario)):
            if await self._live_once(start) or self.violation is not None:
                return
        self.fail(Violation("progress", f"not done after {starts} starts"))

    async def _live_once(self, start: int) -> bool:
        """One start of the run; True at its end or where an invariant is broken."""
        fired = len(self.fired)
        self.note("world", "start", start)
        self._turns.go_on()  # a driver may have been killed when none ran
        self._killed = False
        self._turns.progress()
        disk_was_broken = self.disk.is_broken
        self._journal.driver_starts()
        run = self.run = Run(self, number=start)
        work = asyncio.create_task(run.go(), name="driver")
        done, error = False, None
        try:
            done = await work
        except asyncio.CancelledError:
            error = "killed"
        except BaseException as failure:  # noqa: BLE001 - whatever ends the driver; the world goes on
            error = "; ".join(causes(failure))
        finally:
            await self._clean_up()
        self.note("world", "ended", done, error and error.replace(str(self.directory), ""))
        self._remember(run)
        if error is not None and error != "killed":
            self._require_excuse(error, self.fired[fired:], disk_was_broken=disk_was_broken)
            self.judge(self._journal.read_error, error)
            await asyncio.sleep(OPERATOR_S)
        if error is None:
            self.judge(self.oracle.check_records_complete, run.ledger_lines())
        if done:
            self.judge(self.oracle.finish, self._journal.newest_state(), train_step=run.train_step)
        return done

    def _remember(self, run: Run) -> None:
        self.judge(self.oracle.ended, run.records())
        if self._journal.is_opening:  # nobody was told what it goes on from, and the records are of the run before
            self.judge(self.oracle.records, run.untold_records())
            return
        self.judge(self.oracle.admitted, run.queue_state().unfinished)
        self.judge(self.oracle.records, run.records())

    def _require_excuse(self, error: str, fired: list[Fault], *, disk_was_broken: bool) -> None:
        """A run may only fail for what was broken on purpose, and says so."""
        lost = 0 if self.run is None else len(self.run.fleet.lost)
        if not may_end(error, fired=fired, scenario=self.scenario, lost=lost, disk_was_broken=disk_was_broken):
            self.fail(Violation("failure", f"the run failed, and nothing was broken that may end it: {error}"))

    def _serving(self) -> list[str]:
        return [] if self.run is None else list(self.run.serving)

    # ---- the loop

    def _fault_of_turn(self, fault: Fault) -> None:
        if self.run is None:
            return
        self._happened(fault)
        match fault.kind:
            case "driver dies":
                self.kill("driver")
            case "stop is asked for":
                self.run.lives.request_stop()
            case _:
                self.kill(fault.point.removeprefix("turn/"))

    def _happened(self, fault: Fault) -> None:
        self.fired.append(fault)
        self.note("fault", str(fault))

    def _stands_still(self, waited: str) -> None:
        self.fail(Violation("progress", f"no train step in {waited}"))

    def _kill_driver(self, cause: str) -> None:
        """Stop every task where it is; what they still do on their way out reaches nobody."""
        self.note("world", "kill", cause)
        self._killed = True
        if self.run is not None:
            self.run.cut_off()
        self._turns.cut_off()

    def _is_dead(self) -> bool:
        """Whether the process whose work runs now was killed."""
        process = current_process()
        return self._killed or (process is not None and process.ended)

    def _opened(self, result: object) -> None:
        """Files that work in a thread opened are closed some time after the death of its process."""
        if isinstance(result, EventStore | _Files):
            self._files.append(result)
            process = current_process()
            if process is not None:
                process.has_open(result)

    def _close_files(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    def _slow_disk_s(self) -> float:
        fault = self.fault("disk/work")
        return 0.0 if fault is None else fault.amount

    async def _clean_up(self) -> None:
        """End whatever a run left behind."""
        assert self.run is not None
        self.run.cut_off()
        self._killed = True
        await self._turns.clean_up()
        self._close_files()
        self.run.recorder.close()
        self._turns.go_on()


def run_to_end(world: World, loop: VirtualTimeLoop) -> None:
    """Run a world on its loop; a standstill is a violation."""

    async def named(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("world")
        try:
            await work
        finally:
            loop.on_turn = None

    try:
        with (
            world.disk.installed(file_bytes=world.scenario.file_bytes),
            asyncio.Runner(loop_factory=lambda: loop) as runner,
        ):
            runner.run(named(world.live()))
    except Deadlock as deadlock:
        with contextlib.suppress(Violation):
            world.violation = world.violation or Violation("progress", str(deadlock))
