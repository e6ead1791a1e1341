"""Teachers of a rollout worker: scores, failures as data, the bound on those that wait, and what a restart reads."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from agent_loop.loop import Message, Prompt
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.router import ReplicaRouter
from async_rl.inference.vllm.config import VllmConfig
from async_rl.rollout.content.writer import ContentWriter
from async_rl.rollout.recorded import RolloutLog
from async_rl.rollout.rollouter import DroppedGroup, FailureConfig, Rollouter
from async_rl.rollout.teachers import TeacherConfig, Teachers, teacher_of
from message_queue.errors import AnswerError, PromptError, ReplicaLostError
from message_queue.heads import head_of
from message_queue.ledger import DropKind
from message_queue.tokens import StopReason
from message_queue.training_sequence import TeacherScores, content_of
from tests.helpers.groups import segment
from tests.helpers.stored import RUN, admission, read

CONFIG = TeacherConfig(checkpoint="none", engine=VllmConfig(), timeout_s=0.2, tries=2)
TOP = 3
STUDENT_IDS = 1000


def prompt(teacher=None):
    return Prompt(index=1, messages=(Message(role="user", content="question"),), teacher=teacher)


class FakeTeacher:
    """A replica whose score of the token at position p is -p - `offset`; `answers` may spoil the first answers."""

    def __init__(self, name="teacher-a-0", *, answers=(), offset=0.0):
        self.name = self.node = name
        self.answers, self.offset, self.requests = list(answers), offset, []
        self.free = asyncio.Event()
        self.free.set()

    async def call(self, _method, request):
        self.requests.append(request)
        await self.free.wait()
        failure = self.answers.pop(0) if self.answers else None
        if isinstance(failure, Exception):
            raise failure
        if failure == "hang":
            await asyncio.Event().wait()
        positions = np.arange(request.first, len(request.token_ids))
        ids = np.tile(np.array([5, 7, STUDENT_IDS + 3], np.int32), (len(positions), 1))
        top = np.tile(np.array([-0.5, -1.5, -2.5], np.float32), (len(positions), 1))
        return TeacherScores(
            logprobs=(-positions - self.offset).astype(np.float32),
            ids=ids[:, : request.top_k],
            top_logprobs=top[:, : request.top_k],
        )


def teachers(*replicas, top_k=0, config=CONFIG, **others):
    """Teachers, of which `a` has the replicas."""
    pools = {"a": replicas, **others}
    routers = {name: ReplicaRouter(ReplicaPool(list(each))) for name, each in pools.items()}
    return Teachers(dict.fromkeys(pools, config), routers=routers, top_k=top_k, vocab_size=STUDENT_IDS)


class Loop:
    """Two turns; or one, and a fork of the first by another agent that is not trained."""

    def __init__(self, *, forks=False):
        self.forks, self.runs = forks, 0

    async def run(self, prompt, *, trajectory, session, cache_salt):
        self.runs += 1
        await asyncio.sleep(0)
        trajectory.observe(np.arange(3, dtype=np.int32))
        trajectory.extend(segment(2))
        if self.forks:
            fork = trajectory.fork(turns=1)
            fork.agent = "critic"
            fork.observe(np.arange(2, dtype=np.int32))
            fork.extend(segment(4))
            trajectory.close(stop_reason=StopReason.STOP, reward=1.0, rewards={"policy": 1.0})
            return
        trajectory.observe(np.arange(1, dtype=np.int32))
        trajectory.extend(segment(3))
        trajectory.close(stop_reason=StopReason.STOP, reward=1.0)


def rollouter(scoring, *, loop=None, n=2, **options):
    return Rollouter(loop=loop or Loop(), routing=None, trajectories_per_group=n, teachers=scoring, **options)


def scored(group):
    return [sequence.teacher for of_one in content_of(group) for sequence in of_one]


async def test_each_sampled_token_has_the_score_of_its_position():
    scoring = teachers(replica := FakeTeacher())
    group = await rollouter(scoring).roll(prompt(), admission(0))
    assert [each.logprobs.tolist() for each in scored(group)] == [[-3, -4, -6, -7, -8]] * 2
    assert all(each.top_k == 0 for each in scored(group))
    assert all((r.first, len(r.token_ids)) == (3, 9) for r in replica.requests)
    counts = scoring.take_counts()
    assert (counts.trajectories, counts.failures, counts.most_waiting) == (2, 0, 2) and counts.seconds >= 0
    assert scoring.take_counts().trajectories == 0


async def test_the_most_likely_tokens_are_those_that_the_student_has():
    (found,) = scored(await rollouter(teachers(FakeTeacher(), top_k=TOP), n=1).roll(prompt(), admission(0)))
    assert found.ids[0].tolist() == [5, 7, -1]
    assert found.top_logprobs[0].tolist() == [-0.5, -1.5, -np.inf]


async def test_a_path_of_an_untrained_agent_is_not_scored():
    scoring = teachers(replica := FakeTeacher())
    group = await rollouter(scoring, loop=Loop(forks=True), n=1).roll(prompt(), admission(0))
    assert [None if each is None else len(each) for each in scored(group)] == [2, None]
    assert len(replica.requests) == 1


async def test_the_teacher_of_a_prompt_scores_its_rollouts_and_no_other():
    a, b = FakeTeacher(), FakeTeacher("teacher-b-0", offset=100.0)
    scoring = teachers(a, b=(b,))
    rolling = rollouter(scoring, n=1)
    for number, (name, first) in enumerate([("a", -3.0), ("b", -103.0), ("", None)]):
        (found,) = scored(await rolling.roll(prompt(name), admission(number)))
        assert (None if found is None else found.logprobs[0]) == first
    assert (len(a.requests), len(b.requests)) == (1, 1)
    for name in (None, "c"):
        with pytest.raises(PromptError, match="teacher"):
            scoring.of(prompt(name))
        assert (await rolling.roll(prompt(name), admission(7))).reason.kind is DropKind.ROLLOUT_FAILED


def test_the_only_teacher_is_that_of_each_prompt_that_names_none():
    assert teacher_of(prompt(), {"a": CONFIG}) == "a"
    assert teacher_of(prompt(""), {"a": CONFIG}) is None
    assert teacher_of(prompt("a"), {}) is None, "the same task without teachers"


async def test_a_failed_try_is_repeated_and_counted():
    scoring = teachers(replica := FakeTeacher(answers=[AnswerError("odd"), None]))
    group = await rollouter(scoring, n=1).roll(prompt(), admission(0))
    assert len(scored(group)[0]) == 5 and scoring.take_counts().failures == 1
    assert len({request.request_id for request in replica.requests}) == 2


@pytest.mark.parametrize("answers", [[AnswerError("odd")] * 2, ["hang"] * 2], ids=["errors", "silence"])
@pytest.mark.parametrize("policy", ["drop", "rest", "fill"])
async def test_a_teacher_that_fails_is_data(tmp_path, policy, answers):
    """Of three rollouts the first that is scored fails, after its loop has closed it."""
    store = await ContentWriter.open(tmp_path, name="rollout-0000", run=RUN, fsync=False)
    failed, loop = [], Loop()
    one = replace(CONFIG, tries=1)
    rolling = rollouter(
        teachers(FakeTeacher(answers=answers[:1]), config=one),
        loop=loop,
        n=3,
        log=RolloutLog(store),
        failure=FailureConfig(on_failed=policy, max_retries=5),
        failed=failed.append,
        decode=str,
    )
    group = await rolling.roll(prompt(), admission(0))
    assert [each.error_kind for each in failed] == ["TeacherError"]
    await store.close()
    if policy == "drop":
        assert isinstance(group, DroppedGroup) and group.reason.kind is DropKind.TEACHER_FAILED
        assert "teacher a failed 1 times" in group.reason.text
        return
    assert loop.runs == {"rest": 3, "fill": 4}[policy], "no retry of the rollout itself"
    assert Counter(t.failed for t in head_of(group).trajectories)[True] == 1
    assert len(scored(group)) == {"rest": 2, "fill": 3}[policy] and None not in scored(group)
    (found,) = read(tmp_path, 0).groups.values()
    assert found.closed
    assert [t.stop_reason for t in found.trajectories] == [t.stop_reason for t in group.trajectories]


async def test_all_tries_that_fail_name_teacher_and_cause():
    scoring = teachers(FakeTeacher(answers=["hang", AnswerError("the last cause")]))
    group = await rollouter(scoring, n=1).roll(prompt(), admission(0))
    assert "teachers.a.tries" in group.reason.text and "the last cause" in group.reason.text
    assert scoring.take_counts().failures == CONFIG.tries


async def test_requests_of_a_replica_that_dies_are_sent_once_more_and_cost_no_try():
    dying, other = FakeTeacher(answers=[ReplicaLostError("killed")]), FakeTeacher("teacher-a-1")
    scoring = teachers(dying, other, config=replace(CONFIG, tries=1))
    group = await rollouter(scoring, n=1).roll(prompt(), admission(0))
    assert len(scored(group)[0]) == 5 and scoring.take_counts().failures == 0
    assert len(other.requests) == 1


async def test_no_rollout_starts_while_too_many_wait_and_none_is_lost():
    """Groups of one rollout each; the teacher is stuck until the bound holds."""
    replica, loop = FakeTeacher(), Loop()
    replica.free.clear()
    config = replace(CONFIG, max_waiting=3, timeout_s=60.0)
    scoring = teachers(replica, config=config)
    rolling = rollouter(scoring, loop=loop, n=1)
    first = [asyncio.create_task(rolling.roll(prompt(), admission(number))) for number in range(3)]
    await asyncio.sleep(0.01)
    assert loop.runs == 3 == scoring.take_counts().most_waiting
    later = [asyncio.create_task(rolling.roll(prompt(), admission(number))) for number in range(3, 10)]
    await asyncio.sleep(0.01)
    assert loop.runs == 3, "the rollouts of later groups wait"
    replica.free.set()
    groups = await asyncio.gather(*first, *later)
    assert loop.runs == 10 and all(scored(group)[0] is not None for group in groups)


async def test_a_hand_out_scores_closed_rollouts_whose_scores_are_missing(tmp_path):
    """The worker dies between the end of the loops and the scores of one of two rollouts."""
    store = await ContentWriter.open(tmp_path, name="rollout-0000", run=RUN, fsync=False)
    replica = FakeTeacher(answers=[None, "hang"])
    config = replace(CONFIG, timeout_s=60.0)
    rolling = rollouter(teachers(replica, config=config, top_k=TOP), log=RolloutLog(store))
    lost = asyncio.create_task(rolling.roll(prompt(), admission(0)))
    while len(replica.requests) < 2:  # noqa: ASYNC110 - the fake has no event
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    await rolling.flush()
    lost.cancel()
    await asyncio.wait({lost})
    await store.close()
    (held,) = read(tmp_path, 0).groups.values()
    assert all(t.closed for t in held.trajectories) and not held.closed, "one lacks its scores"
    assert sorted(t.awaits_scores for t in held.trajectories) == [False, True]

    store = await ContentWriter.open(tmp_path, name="rollout-0001", run=RUN, fsync=False)
    loop, successor = Loop(), FakeTeacher()
    rolling = rollouter(teachers(successor, top_k=TOP), loop=loop, log=RolloutLog(store))
    group = await rolling.roll(prompt(), admission(0), existing=held.trajectories, handout=1)
    await store.close()
    assert loop.runs == 0 and len(successor.requests) == 1
    (found,) = read(tmp_path, 0).groups.values()
    assert found.closed
    for ours, stored in zip(scored(group), scored(found), strict=True):
        assert ours.logprobs.dtype == stored.logprobs.dtype == np.float32 and stored.ids.dtype == np.int32
        for name in ("logprobs", "ids", "top_logprobs"):
            assert np.array_equal(getattr(ours, name), getattr(stored, name))


async def test_a_run_without_teachers_needs_no_scores_of_rollouts_that_awaited_some(tmp_path):
    store = await ContentWriter.open(tmp_path, name="rollout-0000", run=RUN, fsync=False)
    rolling = rollouter(
        teachers(FakeTeacher(answers=["hang"]), config=replace(CONFIG, timeout_s=60)), n=1, log=RolloutLog(store)
    )
    lost = asyncio.create_task(rolling.roll(prompt(), admission(0)))
    await asyncio.sleep(0.01)
    await rolling.flush()
    lost.cancel()
    await asyncio.wait({lost})
    await store.close()
    held = read(tmp_path, 0).groups[0].trajectories[:1]
    assert held[0].awaits_scores
    group = await rollouter(None, n=1).roll(prompt(), admission(0), existing=held)
    assert group.closed and scored(group) == [None]
