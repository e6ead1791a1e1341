"""The replica that serves a request, and the way of the request if that replica fails."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.engine import GenerateRequest
from async_rl.inference.gate import DraftCounts, ReplicaStats
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.inference.router import ReplicaRouter
from message_queue.errors import AnswerError, EngineError, ReplicaLostError
from tests.agent_loop.test_decoder import STOP, decoded
from tests.helpers.fakes import FakeEngine, Interruption, SeededScript, true_rows
from tests.helpers.fakes.rollouts import RolloutsHere

pytestmark = pytest.mark.virtual_time

SCRIPT = SeededScript(3, vocab_size=50, stop_token=STOP, mean_length=40)


def served(replicas):
    """Sessions of the requests that each replica got."""
    return [[request.session for request in replica.requests] for replica in replicas]


def request(session):
    return GenerateRequest(request_id=f"{session}.", token_ids=np.zeros(1, np.int32), max_new_tokens=1, session=session)


def fakes(count, **options):
    return [FakeEngine(SCRIPT, name=f"fake-{i}", **options) for i in range(count)]


async def test_router_sends_new_sessions_to_the_least_load_and_keeps_them_there():
    replicas = fakes(2)
    router = ReplicaRouter(ReplicaPool(replicas))
    for sessions in ("abcd", "dba"):
        async with asyncio.TaskGroup() as requests:
            for session in sessions:
                requests.create_task(router.generate(request(session)))
    assert served(replicas) == [["a", "c", "a"], ["b", "d", "d", "b"]]


def test_pool_refuses_no_replica_and_two_of_one_name():
    with pytest.raises(ValueError, match=r"engine\.replicas"):
        ReplicaPool([])
    with pytest.raises(ValueError, match="'fake-0', 'fake-0'"):
        ReplicaPool(fakes(1) + fakes(1))


async def test_router_sends_nothing_to_an_avoided_replica_unless_it_is_the_last():
    replicas = fakes(2)
    pool = ReplicaPool(replicas)
    router = ReplicaRouter(pool)
    for avoided, sessions in ([], "a"), (["fake-0"], "ab"), ([], "a"):
        pool.avoid(avoided)
        for session in sessions:
            await router.generate(request(session))
    assert served(replicas) == [["a"], ["a", "b", "a"]], "its prefix is cached at its new replica"
    pool.avoid(["fake-0"])
    replicas[1].die()
    for session in "cac":
        await router.generate(request(session))
    assert served(replicas)[0] == ["a", "c", "a", "c"]


async def test_pool_reports_a_failed_replica_with_the_end_of_its_log():
    (replica,), notes = fakes(1), []
    pool = ReplicaPool([replica], on_lost=notes.append)
    with pytest.raises(ReplicaLostError):
        async with pool.calling(pool.live[0]):
            error = ReplicaLostError("fake-0 died")
            error.add_note("the end of fake-0.log:")
            raise error
    (note,) = notes
    first, *rest = note.splitlines()
    assert "fake-0 died" in first and "0 left" in first and rest == ["the end of fake-0.log:"]
    with pytest.raises(ReplicaLostError, match="fake-0") as raised:
        pool.require_any()
    assert raised.value.__notes__ == ["the end of fake-0.log:"]


@settings(max_examples=60)
@given(
    cut=st.integers(0, 20),
    death=st.integers(0, 12),
    versions=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    stride=st.integers(1, 20),
)
def test_router_keeps_all_that_a_replica_returned_before_its_death(cut, death, versions, stride):
    first = FakeEngine(SCRIPT, name="fake-0", version=versions[0], interruptions=[Interruption(after=cut)])
    second = FakeEngine(SCRIPT, name="fake-1", version=versions[1])

    async def run():
        pool = ReplicaPool([first, second])
        rollout = asyncio.create_task(decoded(ReplicaRouter(pool), budget=30, segment_tokens=stride))
        for _ in range(cut + death):
            await asyncio.sleep(0)
        first.die()
        return await rollout, await decoded(FakeEngine(SCRIPT), budget=30)

    (trajectory, reason, _), (plain, plain_reason, _) = asyncio.run(run())
    assert sum(len(s) for s in trajectory.segments if s.replica == "fake-0") == first.num_tokens
    assert all(request.max_new_tokens <= stride for request in first.requests), "and no more was under way"
    assert (trajectory.token_ids().tolist(), reason) == (plain.token_ids().tolist(), plain_reason)
    assert trajectory.num_rows == len(trajectory) - 1
    assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()
    if second.requests:
        assert second.requests[0] is first.requests[-1], "the request moves unchanged"
    assert all(s.weights.version == versions[int(s.replica[-1])] for s in trajectory.segments)


async def test_replica_that_hangs_frees_its_requests_as_soon_as_it_is_noticed():
    first, second = fakes(2, token_s=0.001)
    pool = ReplicaPool([first, second])
    rollout = asyncio.create_task(decoded(ReplicaRouter(pool), budget=40))
    await asyncio.sleep(0.01)
    first.hang()
    await asyncio.sleep(0.05)
    assert not rollout.done()
    pool.lose(pool.live[0], reason="no answer in 5 s")
    trajectory, _, _ = await rollout
    assert {s.replica for s in trajectory.segments} == {"fake-1"}
    assert first.in_flight == 0  # its caller was cancelled


async def test_router_without_a_replica_left_names_each_with_its_reason():
    first, second = fakes(2)
    first.die("out of memory")
    second.die("node gone")
    router = ReplicaRouter(ReplicaPool([first, second]))
    for _ in range(2):
        with pytest.raises(ReplicaLostError, match=r"fake-0: .*out of memory.*fake-1: .*node gone"):
            await decoded(router, budget=40)


@pytest.mark.parametrize(
    ("options", "timeout_s"), [({"fail": lambda _: EngineError("prompt too long")}, 5.0), ({"token_s": 0.01}, 0.03)]
)
async def test_router_keeps_a_replica_whose_request_failed_or_ran_out_of_the_time_of_its_caller(options, timeout_s):
    pool = ReplicaPool(fakes(2, **options))
    with pytest.raises(EngineError):
        await decoded(ReplicaRouter(pool), budget=40, generate_timeout_s=timeout_s)
    assert [m.in_flight for m in pool.live] == [0, 0]


async def test_watch_removes_a_replica_that_does_not_answer():
    first, second = fakes(2, token_s=0.001)
    pool = ReplicaPool([first, second])
    watch = asyncio.create_task(pool.watch(every_s=0.01, timeout_s=0.02))
    await asyncio.sleep(0.05)
    assert pool.lost == {}
    first.hang()
    await asyncio.sleep(0.1)
    assert list(pool.lost) == ["fake-0"] and "0.02 s" in pool.lost["fake-0"]
    watch.cancel()


async def test_busy_seconds_and_drafts_are_of_all_replicas_and_never_decrease():
    replicas = fakes(2)
    pool = ReplicaPool(replicas)
    for first, second, mean in ((4.0, 2.0, 3.0), (None, 6.0, 5.0)):
        for replica, seconds in zip(replicas, (first, second), strict=True):
            drafts = DraftCounts(int(10 * (seconds or 0)), 5)
            read = ReplicaStats(in_flight=0, busy_seconds=seconds or 0.0, drafts=drafts)
            replica.stats = lambda read=read: asyncio.sleep(0, read)
        if first is None:
            replicas[0].die()
            del replicas[0].stats
        assert await pool.busy_seconds() == mean
        assert pool.drafts == DraftCounts(int(20 * mean), 10), "of the dead one, the last reading"
    assert list(pool.lost) == ["fake-0"]


async def test_abort_all_does_not_wait_for_an_answer_that_was_refused():
    class Bad(FakeEngine):
        async def generate(self, request):
            await super().generate(request)
            raise AnswerError(f"{self.name}: an expert twice")

    bad = Bad(SCRIPT, name="fake-0", token_s=0.01)
    pool = ReplicaPool([bad])
    rollout = asyncio.create_task(ReplicaRouter(pool).generate(replace(request("s"), max_new_tokens=1000)))
    while not bad.in_flight:  # noqa: ASYNC110 - a fake has no event for it
        await asyncio.sleep(0)
    await Publisher(pool, on_update="resume", rollouts=RolloutsHere(), timeout_s=0.3).abort_all()
    assert [member.name for member in pool.live] == ["fake-0"]
    with pytest.raises(AnswerError):
        await rollout
