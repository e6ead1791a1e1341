"""Which replica serves a request, and what happens to it when that replica is lost."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.decoder import SegmentDecoder
from agent_loop.engine import AnswerError, EngineError, GenerateRequest, ReplicaLostError, SamplingConfig
from agent_loop.loop import TurnLimits
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.inference.router import ReplicaRouter
from message_queue.tokens import StopReason
from message_queue.trajectory import Trajectory
from tests.helpers.fakes import SPEC, FakeEngine, Interruption, SeededScript, fake_weights, true_rows
from tests.helpers.fakes.rollouts import RolloutsHere

STOP = 0
SCRIPT = SeededScript(3, vocab_size=50, stop_token=STOP, mean_length=40)


class Recording:
    def __init__(self, name="replica-0"):
        self.name = name
        self.served = []
        self.release = asyncio.Event()

    async def generate(self, request):
        self.served.append(request.session)
        await self.release.wait()
        return request.session


def recordings(count):
    return [Recording(f"replica-{i}") for i in range(count)]


def request(session):
    return GenerateRequest(request_id=f"{session}.", token_ids=np.zeros(1, np.int32), max_new_tokens=1, session=session)


def fakes(count, **options):
    return [FakeEngine(SCRIPT, name=f"fake-{i}", **options) for i in range(count)]


async def decode(engine, *, session="s", budget=40, resume_routing="append", timeout_s=5.0, segment_tokens=4096):
    trajectory = Trajectory(routing=SPEC, resume_routing=resume_routing)
    trajectory.observe(np.arange(5, 12, dtype=np.int32))
    decoder = SegmentDecoder(
        engine,
        sampling=SamplingConfig(),
        stop_token_ids=(STOP,),
        session=session,
        cache_salt="",
        limits=TurnLimits(
            max_turns=1, max_tokens=7 + budget, generate_timeout_s=timeout_s, segment_tokens=segment_tokens
        ),
    )
    return trajectory, await decoder.decode(trajectory, max_new_tokens=budget)


# ---- which replica


async def test_new_sessions_go_to_the_least_loaded_and_stay_there():
    replicas = recordings(2)
    router = ReplicaRouter(replicas)
    first = [asyncio.create_task(router.generate(request(s))) for s in ("a", "b", "c", "d")]
    await asyncio.sleep(0)
    assert [r.served for r in replicas] == [["a", "c"], ["b", "d"]]
    for replica in replicas:
        replica.release.set()
    await asyncio.gather(*first)
    await asyncio.gather(*(router.generate(request(s)) for s in ("d", "b", "a")))
    assert [r.served for r in replicas] == [["a", "c", "a"], ["b", "d", "d", "b"]]


async def test_a_failed_request_does_not_count_as_load():
    class Failing(Recording):
        async def generate(self, request):
            raise RuntimeError

    pool = ReplicaPool([Failing("bad"), Recording()])
    router = ReplicaRouter(pool)
    for session in ("a", "b", "c"):
        with pytest.raises(RuntimeError):
            await router.generate(request(session))
    assert [member.in_flight for member in pool.live] == [0, 0]


def test_no_replica_is_refused():
    with pytest.raises(ValueError, match=r"engine\.replicas"):
        ReplicaRouter([])


def test_two_replicas_of_one_name_are_refused():
    with pytest.raises(ValueError, match="give each a name of its own"):
        ReplicaPool(fakes(1) + fakes(1))


# ---- lost replicas


async def test_a_request_whose_replica_dies_goes_to_another_one_as_it_was_asked():
    first, second = fakes(2, token_s=0.001)
    notes = []
    router = ReplicaRouter(ReplicaPool([first, second], on_lost=notes.append))
    rollout = asyncio.create_task(decode(router))
    await asyncio.sleep(0.01)
    assert first.in_flight == 1
    first.die("out of memory")
    trajectory, _ = await rollout
    plain, _ = await decode(FakeEngine(SCRIPT))
    assert trajectory.token_ids().tolist() == plain.token_ids().tolist()
    assert [r.request_id for r in second.requests] == [r.request_id for r in first.requests]
    assert {s.replica for s in trajectory.segments} == {"fake-1"}
    assert notes == ["replica fake-0 is lost, 1 left: replica fake-0 is dead: out of memory"]


async def test_a_lost_replica_is_reported_with_the_end_of_its_log():
    (replica,), notes = fakes(1), []
    pool = ReplicaPool([replica], on_lost=notes.append)
    with pytest.raises(ReplicaLostError):
        async with pool.calling(pool.live[0]):
            error = ReplicaLostError("fake-0 died")
            error.add_note("the end of fake-0.log:")
            raise error
    assert notes == ["replica fake-0 is lost, 0 left: fake-0 died\nthe end of fake-0.log:"]
    with pytest.raises(ReplicaLostError, match="all 1 replicas are lost") as raised:
        pool.require_any()
    assert raised.value.__notes__ == ["the end of fake-0.log:"]


@settings(deadline=None, max_examples=40)
@given(cut=st.integers(0, 20), death=st.integers(0, 12), version=st.integers(0, 2), stride=st.integers(1, 20))
def test_what_was_returned_before_a_death_is_kept_and_the_rest_comes_from_another_replica(cut, death, version, stride):
    async def run():
        first = FakeEngine(SCRIPT, name="fake-0", interruptions=[Interruption(after=cut)])
        second = FakeEngine(SCRIPT, name="fake-1", version=version)
        router = ReplicaRouter([first, second])
        rollout = asyncio.create_task(decode(router, budget=30, segment_tokens=stride))
        for _ in range(cut + death):
            await asyncio.sleep(0)
        first.die()
        return await rollout, await decode(FakeEngine(SCRIPT), budget=30), first

    (trajectory, reason), (plain, plain_reason), first = asyncio.run(run())
    assert sum(len(s) for s in trajectory.segments if s.replica == "fake-0") == first.num_tokens, "all it returned"
    assert all(request.max_new_tokens <= stride for request in first.requests), "and no more was under way"
    assert (trajectory.token_ids().tolist(), reason) == (plain.token_ids().tolist(), plain_reason)
    assert trajectory.num_rows == len(trajectory) - 1
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()
    assert {s.weights.version for s in trajectory.segments if s.replica == "fake-1"} <= {version}


async def test_a_session_stays_where_it_went_when_its_replica_was_lost():
    first, second, third = recordings(3)
    for replica in (first, second, third):
        replica.release.set()
    pool = ReplicaPool([first, second, third])
    router = ReplicaRouter(pool)
    await router.generate(request("a"))
    pool.lose(pool.live[0], reason="gone")
    for _ in range(3):
        await router.generate(request("a"))
    assert (first.served, second.served, third.served) == (["a"], ["a"] * 3, [])


async def test_a_replica_that_hangs_frees_its_requests_as_soon_as_anybody_notices():
    first, second = fakes(2, token_s=0.001)
    pool = ReplicaPool([first, second])
    rollout = asyncio.create_task(decode(ReplicaRouter(pool)))
    await asyncio.sleep(0.01)
    first.hang()
    await asyncio.sleep(0.05)
    assert not rollout.done()
    pool.lose(pool.live[0], reason="no answer in 5 s")
    trajectory, _ = await rollout
    assert {s.replica for s in trajectory.segments} == {"fake-1"}
    assert first.in_flight == 0  # its caller was cancelled


async def test_when_no_replica_is_left_the_error_names_each_with_its_reason():
    first, second = fakes(2)
    first.die("out of memory")
    second.die("node gone")
    router = ReplicaRouter([first, second])
    for _ in range(2):
        with pytest.raises(ReplicaLostError) as caught:
            await decode(router)
        assert str(caught.value) == (
            "all 2 replicas are lost (fake-0: replica fake-0 is dead: out of memory; "
            "fake-1: replica fake-1 is dead: node gone)"
        )


async def test_other_errors_of_an_engine_do_not_take_it_out():
    replica = FakeEngine(SCRIPT, fail=lambda r: EngineError("prompt too long"))
    pool = ReplicaPool([replica, FakeEngine(SCRIPT, name="fake-1")])
    with pytest.raises(EngineError, match="too long"):
        await decode(ReplicaRouter(pool))
    assert len(pool.live) == 2


async def test_a_time_out_of_the_caller_is_not_taken_for_a_loss():
    pool = ReplicaPool(fakes(2, token_s=0.01))
    with pytest.raises(EngineError, match="got no answer"):
        await decode(ReplicaRouter(pool), timeout_s=0.03)
    assert len(pool.live) == 2
    assert [m.in_flight for m in pool.live] == [0, 0]


async def test_many_requests_on_a_lost_replica_all_move():
    first, second = fakes(2, token_s=0.001)
    router = ReplicaRouter([first, second])
    rollouts = [asyncio.create_task(decode(router, session=f"s{i}")) for i in range(200)]
    while first.in_flight <= 50:  # noqa: ASYNC110 - a fake has no event for it
        await asyncio.sleep(0)
    first.die()
    done = await asyncio.gather(*rollouts)
    for trajectory, reason in done:
        assert reason in (StopReason.STOP, StopReason.LENGTH)
        assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()


async def test_a_rollout_that_moves_to_older_weights_keeps_each_token_with_its_version():
    first = FakeEngine(SCRIPT, name="fake-0", version=5, interruptions=[Interruption(after=6)])
    second = FakeEngine(SCRIPT, name="fake-1", version=4)
    router = ReplicaRouter([first, second])
    rollout = asyncio.create_task(decode(router, budget=30))
    for _ in range(12):
        await asyncio.sleep(0)
    assert (len(first.requests), first.in_flight) == (2, 1)
    first.die()
    trajectory, _ = await rollout
    assert [s.weights for s in trajectory.segments] == [fake_weights(5), fake_weights(4)]
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()


async def test_the_watch_takes_out_what_does_not_answer_and_leaves_what_does():
    first, second = fakes(2, token_s=0.001)
    pool = ReplicaPool([first, second])
    watch = asyncio.create_task(pool.watch(every_s=0.01, timeout_s=0.02))
    await asyncio.sleep(0.05)
    assert pool.lost == {}
    first.hang()
    await asyncio.sleep(0.1)
    assert pool.lost == {"fake-0": "fake-0 did not answer within 0.02 s"}
    watch.cancel()


# ---- the busy clock


async def test_busy_seconds_are_the_mean_over_all_replicas_and_never_go_back():
    replicas = fakes(2)
    pool = ReplicaPool(replicas)

    async def busy(seconds):
        return type("Stats", (), {"busy_seconds": seconds})()

    replicas[0].stats = lambda: busy(4.0)
    replicas[1].stats = lambda: busy(2.0)
    assert await pool.busy_seconds() == 3.0
    replicas[0].die()
    del replicas[0].stats
    replicas[1].stats = lambda: busy(6.0)
    assert await pool.busy_seconds() == 5.0
    assert list(pool.lost) == ["fake-0"]


async def test_an_interrupt_does_not_wait_for_an_answer_that_came_and_was_refused():
    class Bad(FakeEngine):
        async def generate(self, request):
            await super().generate(request)
            raise AnswerError(f"{self.name}: an expert twice")

    bad = Bad(SCRIPT, name="fake-0", token_s=0.01)
    pool = ReplicaPool([bad])
    router = ReplicaRouter(pool)
    rollout = asyncio.create_task(router.generate(replace(request("s"), max_new_tokens=1000)))
    while not bad.in_flight:  # noqa: ASYNC110 - a fake has no event for it
        await asyncio.sleep(0)
    await Publisher(pool, on_update="resume", rollouts=RolloutsHere(), timeout_s=0.3).abort_all()
    assert [member.name for member in pool.live] == ["fake-0"]
    with pytest.raises(AnswerError):
        await rollout
