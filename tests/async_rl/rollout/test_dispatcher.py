"""Groups on several rollout workers: their dispatch, and the groups of a worker that dies."""

import asyncio

import pytest

from agent_loop.loop import Message, Prompt
from agent_loop.timeline import TimeSpan
from agent_loop.user_errors import Failure
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.stub import InProcess
from async_rl.inference.supervisor import SupervisionConfig
from async_rl.metrics.validation import ValidationRollout
from async_rl.rollout.dispatcher import Dispatcher, WorkerLostError
from async_rl.rollout.rollouter import DroppedGroup
from async_rl.rollout.worker import LostReplica, RolledGroup
from message_queue.heads import head_of
from message_queue.ledger import Drop, DropKind
from message_queue.trajectory import Admission
from tests.helpers.fakes import FakeEngine, SeededScript
from tests.helpers.groups import group_for

TOO_OLD = Drop(DropKind.EXPIRED, "no batch is left for it")
SCRIPT = SeededScript(0, vocab_size=40, stop_token=1, mean_length=8)


def admission(group):
    return Admission(group=group, prompt=group, admitted_version=0, admitted_update=0)


def prompt(index):
    return Prompt(index=index, messages=(Message(role="user", content="?"),))


class FakeWorker(InProcess):
    """A worker whose rolls end when a test ends them. rolled: groups. calls: all others."""

    def __init__(self, name, *, may_join=None):
        self.name, self._may_join = name, may_join
        self.rolled, self.calls = [], []
        self.reports = asyncio.Queue()
        self._ends = {}
        self._dead = asyncio.Event()

    def die(self):
        self._dead.set()

    def finish(self, group):
        self._ends[group].set_result((RolledGroup(outcome=head_of(group_for(admission(group))), generated=3), "ref"))

    async def roll(self, prompt, admission, existing=(), *, handout):
        self.rolled.append(admission.group)
        end = self._ends[admission.group] = asyncio.get_running_loop().create_future()
        return await self._unless_dead(end)

    async def events(self):
        return [await self._unless_dead(asyncio.ensure_future(self.reports.get()))]

    async def cancel(self, group, *, reason):
        self._answer("cancel", group)
        dropped = DroppedGroup(group=group, reason=reason, segments=0, lengths=())
        self._ends[group].set_result((RolledGroup(outcome=dropped, generated=0), ()))

    async def validate(self, prompts, *, number):
        self._answer("validate", [place for place, _ in prompts])
        if self.name == "dies in a validation":
            self.die()
            self._answer()
        same = {"cut_off": False, "error": None, "prompt": "", "response": "", "min_version": 3, "max_version": 4}
        rollouts = [ValidationRollout(reward=float(prompt.index), tokens=place, **same) for place, prompt in prompts]
        return rollouts, [TimeSpan("validation", "validation 0", 0.0, 1.0, {"round": number})]

    async def follow(self, replicas, *, teacher=None):
        self._answer("follow", [replica.name for replica in replicas])

    async def adopt(self, tools_paused, avoided):
        self._answer("adopt", tools_paused, sorted(avoided))
        if self._may_join is not None:
            await self._may_join.wait()

    async def forget(self, groups):
        self._answer("forget", list(groups))

    def _answer(self, *call):
        if self._dead.is_set():
            raise WorkerLostError(f"{self.name}: process died")
        if call:
            self.calls.append(call)

    async def _unless_dead(self, future):
        dead = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait((future, dead), return_when=asyncio.FIRST_COMPLETED)
        finally:
            dead.cancel()
        self._answer()
        return future.result()


class Started:
    """A dispatcher over fake workers that is watched inside the block."""

    def __init__(self, *names, max_restarts=3):
        self.workers = {name: FakeWorker(name) for name in names}
        self.pool = ReplicaPool([FakeEngine(SCRIPT, name=f"replica-{i}") for i in range(2)])
        self.notes, self.removed, self.started = [], [], []
        self.may_remove = asyncio.Event()
        self.may_remove.set()
        self.may_join = None
        config = SupervisionConfig(max_restarts=max_restarts)
        self.dispatcher = Dispatcher(
            list(self.workers.values()), pool=self.pool, processes=self, config=config, note=self.notes.append
        )

    async def remove_worker(self, lost, *, pool):
        self.removed.append(lost.name)
        await self.may_remove.wait()

    async def start_worker(self, *, slot, name, pool):
        self.started.append((slot, name))
        self.workers[name] = FakeWorker(name, may_join=self.may_join)
        return self.workers[name]

    async def __aenter__(self):
        self.watch = asyncio.create_task(self.dispatcher.watch())
        await turns()
        return self

    async def __aexit__(self, *_error):
        self.watch.cancel()
        await asyncio.wait({self.watch})

    def roll(self, group, **options):
        return asyncio.create_task(self.dispatcher.roll(prompt(group), admission(group), **options))


async def turns(count=30):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_group_goes_to_the_worker_with_the_fewest_groups():
    async with Started("worker-0", "worker-1") as run:
        rolls = []
        for group in range(4):
            rolls.append(run.roll(group))
            await turns()
        assert [worker.rolled for worker in run.workers.values()] == [[0, 2], [1, 3]]
        run.workers["worker-1"].finish(1)
        outcome, content = await rolls[1]
        assert (outcome.group, content) == (1, "ref")
        run.roll(4)
        await turns()
        assert run.workers["worker-1"].rolled[-1] == 4


async def test_a_dead_worker_is_reported_once_if_its_restart_is_cancelled():
    run = Started("worker-0", "worker-1")
    run.remove_worker = lambda _lost, *, pool: asyncio.Event().wait()
    async with run:
        run.workers["worker-0"].die()
        await turns()
    async with run:
        await turns()
    assert ["worker-0" in note for note in run.notes] == [True]


async def test_groups_wait_for_the_restart_of_the_only_worker():
    async with Started("worker-0") as run:
        roll = run.roll(7)
        await turns()
        run.workers["worker-0"].die()
        await turns(200)
        assert (run.removed, run.started) == (["worker-0"], [(0, "worker-1")])
        assert run.workers["worker-1"].rolled == [7]
        run.workers["worker-1"].finish(7)
        assert (await roll)[0].group == 7


async def test_without_restarts_the_death_of_the_last_worker_ends_the_run():
    async with Started("worker-0", "worker-1", max_restarts=0) as run:
        run.workers["worker-0"].die()
        await turns()
        assert not run.watch.done()
        run.workers["worker-1"].die()
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(run.watch, 60)
        assert isinstance(caught.value.exceptions[0], WorkerLostError)


@pytest.mark.parametrize("joins", ["during the publish", "after the publish"])
async def test_a_new_worker_starts_no_tool_during_a_publish(joins):
    async with Started("worker-0") as run:
        may_join = asyncio.Event()
        run.may_join = may_join if joins == "after the publish" else None
        await run.dispatcher.pause()
        run.workers["worker-0"].die()
        await turns(200)
        asked = run.workers["worker-1"].calls
        assert ("adopt", True, []) in asked
        await run.dispatcher.resume()
        may_join.set()
        await turns(200)
        assert [call[1] for call in asked if call[0] == "adopt"] == [True, False]


async def test_all_workers_and_a_new_one_avoid_the_same_replicas():
    async with Started("worker-0", "worker-1") as run:
        await run.dispatcher.avoid({"replica-1"})
        assert all(("adopt", False, ["replica-1"]) in worker.calls for worker in run.workers.values())
        run.workers["worker-0"].die()
        await turns(200)
        assert ("adopt", False, ["replica-1"]) in run.workers["worker-2"].calls
        await run.dispatcher.avoid(())
        assert run.workers["worker-2"].calls[-1] == ("adopt", False, [])


async def test_held_out_prompts_of_a_dead_worker_wait_until_its_requests_are_gone():
    async with Started("dies in a validation", "worker-1") as run:
        run.may_remove.clear()
        validation = asyncio.create_task(run.dispatcher.validate({"": [prompt(i) for i in range(5)]}, 1))
        await turns(200)
        assert run.removed == ["dies in a validation"]
        assert [call for call in run.workers["worker-1"].calls if call[0] == "validate"] == [("validate", [1, 3])]
        run.may_remove.set()
        result = await validation
        assert (result.prompts, result.success_rate, result.min_version, result.max_version) == (5, 2.0, 3, 4)


async def test_rollouts_of_several_workers_are_given_back_to_their_prompts_and_sets():
    async with Started("worker-0", "worker-1") as run:
        sets = {"a": [prompt(0), prompt(1)], "b": [prompt(5)]}
        result = await run.dispatcher.validate(sets, 1, samples=3)
        asked = [call[1] for worker in run.workers.values() for call in worker.calls if call[0] == "validate"]
        assert asked == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
        assert (result.prompts, result.num_rollouts, result.success_rate) == (3, 9, 2.0)
        assert [(each.success_rate, each.mean_tokens) for each in result.sets.values()] == [(0.5, 2.5), (5.0, 7.0)]
        tokens = {name: [[r.tokens for r in each] for each in prompts] for name, prompts in result.rollouts.items()}
        assert tokens == {"a": [[0, 1, 2], [3, 4, 5]], "b": [[6, 7, 8]]}
        assert result.sets["a"].pass_at == {1: 0.5, 2: 0.5}


async def test_workers_follow_the_replicas_and_report_dead_ones():
    async with Started("worker-0", "worker-1") as run:
        assert run.workers["worker-1"].calls == [("follow", ["replica-0", "replica-1"])]
        run.workers["worker-0"].reports.put_nowait(LostReplica(name="replica-0", reason="it died", notes=()))
        await turns()
        assert run.pool.lost == {"replica-0": "it died"}
        assert run.workers["worker-1"].calls[-1] == ("follow", ["replica-1"])
        run.workers["worker-1"].reports.put_nowait(Failure(kind="ValueError", line="", text="a rollout failed"))
        await turns()
        assert run.notes == ["a rollout failed"]


async def test_a_group_is_cancelled_at_the_worker_that_rolls_it_out():
    async with Started("worker-0", "worker-1") as run:
        rolls = [run.roll(group) for group in range(2)]
        await turns()
        run.dispatcher.cancel(1, reason=TOO_OLD)
        run.dispatcher.cancel(9, reason=TOO_OLD)
        outcome, _ = await rolls[1]
        assert (outcome.group, outcome.reason) == (1, TOO_OLD)
        assert not rolls[0].done()
        rolls[0].cancel()
