"""Groups on several rollout workers: which worker gets which, and what happens to those of a worker that dies."""

import asyncio
from dataclasses import replace

import pytest

from agent_loop.loop import Message, Prompt
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.supervisor import SupervisionConfig
from async_rl.rollout.dispatcher import Dispatcher, WorkerLostError
from async_rl.rollout.group_contents import ContentPlace, read_stored
from async_rl.rollout.rollouter import DroppedGroup
from async_rl.rollout.validator import ValidationRound
from async_rl.rollout.worker import LostReplica, RolledGroup
from message_queue.content import ContentWriter
from message_queue.contract import Admission
from message_queue.heads import head_of
from tests.helpers.fakes import FakeEngine, SeededScript
from tests.helpers.groups import group_for, segment, trajectory
from tests.helpers.stored import records_of

PLACE = ContentPlace(directory=None, run="run", fsync=False, trajectories=1, routing=None, resume_routing="append")  # pyright: ignore[reportArgumentType]
SCRIPT = SeededScript(0, vocab_size=40, stop_token=1, mean_length=8)


def admission(group):
    return Admission(group=group, prompt=group, admitted_version=0, admitted_update=0)


def prompt(index):
    return Prompt(index=index, messages=(Message(role="user", content="?"),))


class FakeWorker:
    """A worker whose rolls end when they are told to.

    rolled: (group, tokens held), by number of the hand-out in handouts. calls: all others.
    """

    def __init__(self, name):
        self.name = name
        self.rolled, self.calls, self.handouts, self.writer = [], [], [], None
        self.reports = asyncio.Queue()
        self._ends = {}
        self._dead = asyncio.Event()

    def die(self):
        self._dead.set()

    def finish(self, group):
        self._ends[group].set_result((RolledGroup(outcome=head_of(group_for(admission(group))), generated=3), "ref"))

    async def roll(self, prompt, admission, held=(), *, handout):
        self.rolled.append((admission.group, sum(t.num_sampled for t in held)))
        self.handouts.append(handout)
        end = self._ends[admission.group] = asyncio.get_running_loop().create_future()
        return await self._unless_dead(end)

    async def events(self):
        return [await self._unless_dead(asyncio.ensure_future(self.reports.get()))]

    async def cancel(self, group, *, reason):
        self._require_alive()
        dropped = DroppedGroup(group=group, reason=reason, segments=0, lengths=(), expired=True)
        self._ends[group].set_result((RolledGroup(outcome=dropped, generated=0), None))

    async def open(self, place, *, writer):
        self._require_alive()
        self.writer = await ContentWriter.open(place.directory, name=writer, run=place.run, fsync=False)

    async def validate(self, prompts, *, number):
        self._require_alive()
        self.calls.append(("validate", [place for place, _ in prompts]))
        if self.name == "dies in a validation":
            self.die()
            self._require_alive()
        rewards = [float(place) for place, _ in prompts]
        return ValidationRound(
            rewards=rewards,
            lengths=[1] * len(prompts),
            cut_off=[False] * len(prompts),
            errors=[None] * len(prompts),
            min_version=3,
            max_version=4,
        )

    async def follow(self, replicas):
        self._require_alive()
        self.calls.append(("follow", [replica.name for replica in replicas]))

    async def pause_tools(self):
        self._require_alive()
        self.calls.append("pause_tools")

    async def resume_tools(self):
        self._require_alive()
        self.calls.append("resume_tools")

    async def forget(self, groups):
        self._require_alive()
        self.calls.append(("forget", list(groups)))

    async def flush(self):
        self._require_alive()

    async def end(self):
        self._require_alive()

    def _require_alive(self):
        if self._dead.is_set():
            raise WorkerLostError(f"{self.name}: process died")

    async def _unless_dead(self, future):
        dead = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait((future, dead), return_when=asyncio.FIRST_COMPLETED)
        finally:
            dead.cancel()
        self._require_alive()
        return future.result()


class Started:
    """A dispatcher over fake workers that is watched inside the block."""

    def __init__(self, *names, max_restarts=3):
        self.workers = {name: FakeWorker(name) for name in names}
        self.pool = ReplicaPool([FakeEngine(SCRIPT, name=f"replica-{i}") for i in range(2)])
        self.notes, self.removed, self.started = [], [], []
        self.may_remove = asyncio.Event()
        self.may_remove.set()
        config = SupervisionConfig(max_restarts=max_restarts)
        self.dispatcher = Dispatcher(
            list(self.workers.values()), pool=self.pool, processes=self, config=config, note=self.notes.append
        )

    async def remove_worker(self, lost):
        self.removed.append(lost.name)
        await self.may_remove.wait()

    async def start_worker(self, *, slot, name):
        self.started.append((slot, name))
        made = self.workers[name] = FakeWorker(name)
        return made

    async def __aenter__(self):
        self.watch = asyncio.create_task(self.dispatcher.watch())
        await turns()
        return self

    async def __aexit__(self, *_error):
        self.watch.cancel()
        await asyncio.wait({self.watch})

    def roll(self, group, **options):
        return asyncio.create_task(self.dispatcher.roll(prompt(group), admission(group), **options))

    def rolled(self):
        return {name: worker.rolled for name, worker in self.workers.items()}


async def until(condition):
    """Return once a condition holds that depends on the disk."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - as said
            await asyncio.sleep(0.001)


async def turns(count=30):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_group_goes_to_the_worker_with_the_fewest():
    async with Started("worker-0", "worker-1") as run:
        rolls = []
        for group in range(4):
            rolls.append(run.roll(group))
            await turns()
        assert run.rolled() == {"worker-0": [(0, 0), (2, 0)], "worker-1": [(1, 0), (3, 0)]}
        run.workers["worker-1"].finish(1)
        outcome, content = await rolls[1]
        assert (outcome.group, content) == (1, "ref")
        assert run.dispatcher.tokens.num_generated == 3
        run.roll(4)
        await turns()
        assert run.rolled()["worker-1"][-1] == (4, 0)


async def test_groups_of_a_dead_worker_go_on_at_another_with_what_was_stored(tmp_path):
    async with Started("worker-0", "worker-1") as run:
        await run.dispatcher.open(replace(PLACE, directory=tmp_path), live=())
        rolls = [run.roll(group) for group in range(2)]
        await turns()
        records = records_of(group_for(admission(0)).trajectories[0], group=0)[:-1]
        await run.workers["worker-0"].writer.append(records)
        run.workers["worker-0"].die()
        await until(lambda: run.workers["worker-1"].rolled[1:])
        sampled = group_for(admission(0)).trajectories[0].num_sampled
        assert run.workers["worker-1"].rolled == [(1, 0), (0, sampled)]
        run.workers["worker-1"].finish(0)
        await rolls[0]
        await until(lambda: "worker-2" in run.workers and run.workers["worker-2"].writer)
        assert (run.removed, run.started) == (["worker-0"], [(0, "worker-2")])
        assert {path.stem for path in tmp_path.glob("*.sqlite")} == {f"rollout-000{i}" for i in range(3)}
        assert "worker-0 is lost, 1 groups continue" in run.notes[0]
        for roll in rolls:
            roll.cancel()


async def test_a_worker_taken_for_dead_that_still_writes_replaces_nothing_of_its_successor(tmp_path):
    place, sampled, other = replace(PLACE, directory=tmp_path), trajectory(segment(3)), trajectory(segment(2))
    async with Started("worker-0") as run:
        await run.dispatcher.open(place, live=())
        roll = run.roll(0)
        await turns()
        zombie = run.workers["worker-0"]
        records = records_of(sampled, handout=zombie.handouts[0])
        await zombie.writer.append(records[:1])
        zombie.die()
        await until(lambda: "worker-1" in run.workers and run.workers["worker-1"].rolled)
        successor = run.workers["worker-1"]
        await successor.writer.append(records_of(other, handout=successor.handouts[0])[1:-1])
        await zombie.writer.append(records[1:])
        roll.cancel()
    stored = await read_stored(place, [admission(0)])
    (held,) = stored.groups[0].trajectories
    assert (held.token_ids().tolist(), held.closed) == (other.token_ids().tolist(), False)
    async with Started("worker-0") as restarted:
        await restarted.dispatcher.open(place, live=(0,))
        roll = restarted.roll(0)
        await turns()
        assert zombie.handouts < successor.handouts < restarted.workers["worker-0"].handouts
        roll.cancel()


async def test_a_lost_worker_is_reported_once_if_its_restart_is_cut_off():
    run = Started("worker-0", "worker-1")
    run.remove_worker = lambda _lost: asyncio.Event().wait()
    async with run:
        run.workers["worker-0"].die()
        await turns()
    async with run:
        await turns()
    assert [note for note in run.notes if "is lost" in note] == run.notes and len(run.notes) == 1


async def test_the_only_worker_is_waited_for():
    async with Started("worker-0") as run:
        roll = run.roll(7)
        await turns()
        run.workers["worker-0"].die()
        await turns(200)
        assert run.workers["worker-1"].rolled == [(7, 0)]
        run.workers["worker-1"].finish(7)
        assert (await roll)[0].group == 7


async def test_without_a_restart_the_last_worker_ends_the_run_and_others_do_not():
    async with Started("worker-0", "worker-1", max_restarts=0) as run:
        run.workers["worker-0"].die()
        await turns()
        assert not run.watch.done() and "is not restarted" in run.notes[-1]
        run.workers["worker-1"].die()
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(run.watch, 5)
        assert isinstance(caught.value.exceptions[0], WorkerLostError)


async def test_a_new_worker_starts_no_tool_during_a_publish():
    async with Started("worker-0") as run:
        await run.dispatcher.pause()
        run.workers["worker-0"].die()
        await turns(200)
        assert "pause_tools" in run.workers["worker-1"].calls
        await run.dispatcher.resume()
        assert "resume_tools" in run.workers["worker-1"].calls


async def test_held_out_prompts_are_split_and_the_part_of_a_dead_worker_is_rolled_again():
    async with Started("dies in a validation", "worker-1") as run:
        result = await run.dispatcher.validate([prompt(i) for i in range(5)], 1)
        assert (result.prompts, result.success_rate, result.min_version, result.max_version) == (5, 2.0, 3, 4)
        assert ("validate", [1, 3]) in run.workers["worker-1"].calls


async def test_held_out_prompts_of_a_dead_worker_wait_until_its_requests_are_gone():
    async with Started("dies in a validation", "worker-1") as run:
        run.may_remove.clear()
        validation = asyncio.create_task(run.dispatcher.validate([prompt(i) for i in range(4)], 1))
        await turns(200)
        assert run.removed == ["dies in a validation"]
        assert [call for call in run.workers["worker-1"].calls if call[0] == "validate"] == [("validate", [1, 3])]
        run.may_remove.set()
        assert (await validation).prompts == 4


async def test_workers_hear_of_the_replicas_and_report_lost_ones():
    async with Started("worker-0", "worker-1") as run:
        assert run.workers["worker-1"].calls == [("follow", ["replica-0", "replica-1"])]
        run.workers["worker-0"].reports.put_nowait(LostReplica(name="replica-0", reason="it died", notes=()))
        await turns()
        assert run.pool.lost == {"replica-0": "it died"}
        assert run.workers["worker-1"].calls[-1] == ("follow", ["replica-1"])
        run.workers["worker-1"].reports.put_nowait("a rollout failed")
        await turns()
        assert run.notes == ["a rollout failed"]


async def test_a_group_is_given_up_where_it_is_rolled_out():
    async with Started("worker-0", "worker-1") as run:
        rolls = [run.roll(group) for group in range(2)]
        await turns()
        run.dispatcher.cancel(1, reason="expired")
        run.dispatcher.cancel(9, reason="nobody has it")
        outcome, _ = await rolls[1]
        assert (outcome.group, outcome.reason) == (1, "expired")
        assert not rolls[0].done()
        rolls[0].cancel()
