"""Successors of failed replicas, in publishes and between them."""

import asyncio
import itertools
import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.inference.gate import ReplicaStats
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.inference.stub import InProcess
from async_rl.inference.supervisor import SupervisionConfig, Supervisor
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.worker import LostReplica
from async_rl.run import causes
from async_rl.simulator.virtual_time import run_in_virtual_time
from async_rl.weights.transport import WeightUpdate
from message_queue.errors import EngineError, ReplicaLostError
from message_queue.tokens import WeightVersion
from tests.helpers.fakes.rollouts import RolloutsHere

pytestmark = pytest.mark.virtual_time

MODES = {"at_once": {}, "rolling": {"max_paused": 1}, "staged": {"staged": True}}
CALLS = ("fetch", "stage", "pause", "abort", "load", "checksum", "resume", "stats")
STATS = ReplicaStats(busy_seconds=0.0, in_flight=0)
SETTLED_S = 60.0


class Mortal(InProcess):
    """A replica that dies at the call `dies_at`, or when it is killed."""

    def __init__(self, name, *, dies_at=None, fetch_s=0.1):
        self.name = self.node = name
        self.alive, self.dies_at, self.version = True, dies_at, 0
        self.seconds = {"fetch": fetch_s, "stage": 0.1, "load": 0.3}

    def __getattr__(self, call):
        return partial(self._answer, call)

    async def _answer(self, call, update=None, **_options):
        await asyncio.sleep(self.seconds.get(call, 0.0))
        self.alive = self.alive and call != self.dies_at
        if not self.alive:
            raise ReplicaLostError(f"{self.name} died in {call}")
        if call == "load":
            self.version = update.weights.version
            return update.weights
        return {"abort": 0, "checksum": "same", "stats": STATS}.get(call)


class Supervised:
    """A supervised pool. `successors`: death of each one that is started, in order; None does not die."""

    def __init__(self, replicas, *, mode="at_once", successors=(), max_restarts=3, start_s=0.1):
        self.started, self.notes, self.removed, self.joined = list(replicas), [], [], len(replicas)
        self.pool = ReplicaPool(replicas, on_lost=self.note)
        rollouts, config = RolloutsHere(None), SupervisionConfig(max_restarts=max_restarts)
        self.publisher = Publisher(self.pool, on_update="resume", rollouts=rollouts, timeout_s=30, **MODES[mode])
        self.supervisor = Supervisor(self.pool, self.publisher, start=self.start, config=config, note=self.note)
        self._successors, self._start_s = iter(successors), start_s

    async def start(self, lost, /, *, slot, name):
        self.removed.append(lost.name)
        lost.alive = False
        await asyncio.sleep(self._start_s)
        dies_at = next(self._successors, None)
        if dies_at == "start":
            raise EngineError(f"{name} has no room")
        self.started.append(Mortal(name, dies_at=dies_at))
        return self.started[-1]

    def note(self, text):
        """Counts those that joined and were not lost yet, and compares with the message."""
        self.notes.append(text)
        self.joined += "serves in place of" in text
        if found := re.search(r"is lost, (\d+) left", text):
            lost = sum("is lost" in note for note in self.notes)
            assert int(found[1]) == self.joined - lost, self.notes

    def watch(self):
        return asyncio.create_task(self.supervisor.watch(every_s=2, timeout_s=5))

    @property
    def live(self):
        return sorted(member.name for member in self.pool.live_or_none)


def update_of(version):
    return WeightUpdate(path=Path("weights"), weights=WeightVersion(version, f"d{version}"))


@pytest.mark.parametrize("mode", MODES)
async def test_replica_that_dies_after_its_fetch_is_replaced_and_the_publish_goes_on(mode):
    first, slow = Mortal("replica-0", fetch_s=0.01), Mortal("replica-1", fetch_s=0.6)
    run = Supervised([first, slow], mode=mode)
    watch, publish = run.watch(), asyncio.create_task(run.publisher.publish(update_of(1)))
    await asyncio.sleep(0.3)
    first.alive = False
    run.pool.lose(run.pool.members[0], reason="replica-0 died")
    await publish
    await asyncio.sleep(SETTLED_S)
    watch.cancel()
    assert run.live == ["replica-1", "replica-2"]
    assert [replica.version for replica in run.started if replica.alive] == [1, 1]


async def test_successor_that_dies_is_taken_out_when_a_worker_reports_it():
    run = Supervised([Mortal("replica-0"), Mortal("replica-1")], max_restarts=1)
    rollouts = Dispatcher([], pool=run.pool)
    watch = run.watch()
    for name in ("replica-0", "replica-2"):
        rollouts._lose_replica(LostReplica(name=name, reason="it died", notes=()))
        await asyncio.sleep(1000)
    watch.cancel()
    assert run.live == ["replica-1", "replica-3"]  # the restart of replica-0 left the window
    assert run.removed == list(run.pool.lost) == ["replica-0", "replica-2"]
    assert [member.name for member in run.pool.members] == [f"replica-{number}" for number in range(4)]


def test_name_of_a_member_cannot_be_given_to_another_one():
    pool = ReplicaPool([Mortal("replica-0")])
    with pytest.raises(ValueError, match="replica-0"):
        pool.join(Mortal("replica-0"), slot=0)


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
async def test_watch_ends_with_all_causes_when_no_replica_is_left(max_restarts):
    deaths = itertools.cycle(["start", "stats", "load"])
    run = Supervised([Mortal("a-0", dies_at="stats")], successors=deaths, max_restarts=max_restarts)
    await run.publisher.publish(update_of(1))
    (line,) = await ended(run.watch())
    expected = ["a-0: a-0 died in stats", "a-1: did not start: a-1 has no room", "a-2: a-2 died in stats"]
    expected.append("a-3: did not start: a-3 died in load")
    assert [text for text in expected if text in line] == expected[: max_restarts + 1], line
    assert f"all {max_restarts + 1} replicas are lost" in line


async def ended(watch):
    """The lines that a user reads of the end of the watch."""
    done, _ = await asyncio.wait({watch}, timeout=SETTLED_S)
    assert done, "no replica is left, and the watch goes on"
    return list(causes(watch.exception()))


async def test_successor_that_was_started_is_removed_when_its_start_was_cut_off():
    run = Supervised([Mortal("replica-0"), Mortal("replica-1")], max_restarts=1)
    await run.publisher.publish(update_of(1))
    watch = run.watch()
    run.pool.lose(run.pool.live[0], reason="it died")
    await asyncio.sleep(0.3)  # replica-2 loads
    watch.cancel()
    await asyncio.wait({watch})
    watch = run.watch()
    await asyncio.sleep(SETTLED_S)
    watch.cancel()
    assert run.removed == ["replica-0", "replica-2"] and run.live == ["replica-1", "replica-3"]


@given(
    mode=st.sampled_from(sorted(MODES)),
    count=st.integers(1, 3),
    max_restarts=st.integers(0, 3),
    successors=st.lists(st.sampled_from([None, None, "start", *CALLS])),
    events=st.lists(st.tuples(st.sampled_from([0.0, 0.05, 0.15, 0.4, 3.0]), st.sampled_from(["publish", 0, 1, 2, 3]))),
)
def test_live_members_are_the_replicas_that_are_alive(count, successors, events, **options):
    async def live():
        run = Supervised([Mortal(f"r-{number}") for number in range(count)], successors=successors, **options)
        watch, version, publishes = run.watch(), 0, []
        for seconds, event in [*events, (SETTLED_S, "publish")]:
            await asyncio.sleep(seconds)
            if event == "publish":
                version += 1
                publishes.append(asyncio.create_task(run.publisher.publish(update_of(version))))
            elif alive := [replica for replica in run.started if replica.alive]:
                alive[event % len(alive)].alive = False
        await asyncio.sleep(SETTLED_S)
        alive = [replica for replica in run.started if replica.alive]
        errors = [publish.exception() for publish in publishes if publish.exception() is not None]
        assert all(isinstance(error, ReplicaLostError) for error in errors)
        assert run.live == sorted(replica.name for replica in alive)
        assert {replica.version for replica in alive} <= {version}
        names = [member.name for member in run.pool.members]
        assert len(set(names)) == len(names) == run.joined
        if alive:
            assert not watch.done() and not errors
            watch.cancel()
        else:
            (line,) = await ended(watch)
            assert all(name in line for name in names)
        if options["max_restarts"] == 3 and len(events) + len(successors) < 4:
            assert len(alive) == count, "a restart was allowed"

    run_in_virtual_time(live())
