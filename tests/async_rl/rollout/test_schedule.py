"""The schedule of a run, written and read, and a run that keeps to it."""

import asyncio
import json
from collections import Counter

import numpy as np
import pytest

from agent_loop.engine import GenerateRequest
from agent_loop.loop import Message, Prompt
from async_rl.rollout.schedule import (
    RunSchedule,
    ScheduledGroup,
    ScheduleError,
    ScheduleReplay,
    read_schedule,
    scheduled_groups,
    spans_of,
)
from message_queue.heads import head_of
from message_queue.ledger import Drop, DropKind
from message_queue.tokens import StopReason
from message_queue.trajectory import Admission, PromptGroup, Trajectory
from tests.helpers.groups import segment


def trajectory(*turns):
    """Each turn: (version, tokens) of its segments."""
    made = Trajectory(routing=None)
    for turn in turns:
        made.observe(np.array([1, 2], np.int32))
        for version, tokens in turn:
            made.extend(segment(tokens, version=version, stop_reason=StopReason.ABORT))
    made.close(stop_reason=StopReason.STOP, reward=1.0)
    return made


def group_of(*trajectories, group=0, prompt=0, version=0, update=0):
    return PromptGroup(
        group=group, prompt=prompt, admitted_version=version, admitted_update=update, trajectories=[*trajectories]
    )


def scheduled(group, *spans, prompt=None, admitted=0, step=1):
    return ScheduledGroup(
        group=group, prompt=group if prompt is None else prompt, admitted_update=admitted, train_step=step, spans=spans
    )


def test_spans_of_a_schedule_join_segments_of_the_same_update():
    made = trajectory([(0, 3), (1, 2)], [(1, 4), (2, 1)], [(4, 6)])
    (head,) = head_of(group_of(made)).trajectories
    segments = [(s.weights.version, len(s)) for s in made.segments]
    for sampled in (head.spans, [*segments, (2, 0)]):
        assert spans_of(sampled, {0: 0, 1: 2, 2: 2, 4: 5}) == ((0, 3), (2, 7), (5, 6))


def test_a_schedule_is_read_as_it_was_written(tmp_path):
    group = group_of(trajectory([(1, 2)]), trajectory([(2, 1)]), group=7, prompt=3, version=1, update=2)
    line = {"train_step": 1, "groups": scheduled_groups([head_of(group)], version_updates={1: 2, 2: 3})}
    (tmp_path / "schedule.jsonl").write_text(json.dumps(line) + "\n")
    for path in (tmp_path, tmp_path / "schedule.jsonl"):
        schedule = read_schedule(path)
        assert schedule.groups == (scheduled(7, ((2, 2),), ((3, 1),), prompt=3, admitted=2),)
        assert (schedule.train_steps, schedule.batch_groups, schedule.trajectories_per_group) == (1, 1, 2)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "schedule.jsonl"),
        ("{", "line 1"),
        ('{"train_step": 1, "groups": [{"group": 1}]}', "line 1 .* KeyError"),
        ('{"train_step": 2, "groups": [{"group": 0, "prompt": 0, "admitted_update": 0, "spans": []}]}', "steps"),
    ],
)
def test_a_schedule_that_cannot_be_read_is_refused(tmp_path, text, named):
    if text is not None:
        (tmp_path / "schedule.jsonl").write_text(text)
    with pytest.raises(ScheduleError, match=named):
        read_schedule(tmp_path)


def test_the_order_of_prompts_in_a_schedule_is_that_of_admission():
    schedule = RunSchedule([scheduled(9, ((0, 1),), prompt=4), scheduled(2, ((0, 1),), prompt=11)])

    order = schedule.order(lambda index: Prompt(index=index, messages=(Message(role="user", content=f"{index}"),)))
    assert [(p.index, p.messages[0].content) for p in map(order, (0, 1))] == [(0, "11"), (1, "4")]


class Engine:
    """Samples until the budget, or until `lengths` of the session is reached."""

    def __init__(self, lengths):
        self.version, self._left, self.by_version = 0, dict(lengths), {}

    async def generate(self, request):
        count = min(self._left[request.session], request.max_new_tokens)
        self._left[request.session] -= count
        self.by_version.setdefault(request.session, Counter())[self.version] += count
        reason = StopReason.LENGTH if self._left[request.session] else StopReason.STOP
        return [segment(count, version=self.version, stop_reason=reason)]


class Loop:
    """Decodes to a stop, resuming after each abort."""

    def __init__(self, engine):
        self._engine = engine

    async def run(self, prompt, *, trajectory, session, cache_salt):
        stop = StopReason.ABORT
        while stop is StopReason.ABORT:
            request = GenerateRequest(
                request_id=f"{session}#.", token_ids=np.zeros(1, np.int32), max_new_tokens=1000, session=session
            )
            stop = (await self._engine.generate(request))[-1].stop_reason


def name(group, number):
    return f"g{group}-t{number}"


def test_a_dropped_group_ends_a_run_that_keeps_to_a_schedule():
    schedule_replay = ScheduleReplay(RunSchedule([scheduled(0, ((0, 1),))]), session=name)
    with pytest.raises(ScheduleError, match=r"group 0.* too bad"):
        schedule_replay.dropped(0, reason=Drop(DropKind.ROLLOUT_FAILED, "too bad"))


async def test_a_restart_resumes_within_the_spans_of_the_schedule():
    schedule = RunSchedule([scheduled(0, ((0, 4), (1, 5), (2, 3)), ((0, 4),), admitted=0)])
    schedule_replay = ScheduleReplay(schedule, session=name)
    open_one, closed = Trajectory(routing=None), trajectory([(0, 4)])
    open_one.observe(np.array([1], np.int32))
    for version, tokens in ((0, 4), (1, 2)):
        open_one.extend(segment(tokens, version=version, stop_reason=StopReason.ABORT))
    schedule_replay.resume([group_of(open_one, closed)], train_step=0, cursor=1, updates={0: 0, 1: 1})
    engine = Engine({name(0, 0): 50})
    engine.version = 1
    schedule_replay.loaded(1)
    loop = schedule_replay.loop(Loop(schedule_replay.engine(engine)))
    decode = asyncio.create_task(loop.run(None, trajectory=None, session=name(0, 0), cache_salt=""))
    await schedule_replay.may_load(2)
    engine.version = 2
    schedule_replay.loaded(2)
    await decode
    assert engine.by_version[name(0, 0)] == {1: 3, 2: 47}


async def test_a_prompt_is_admitted_once_the_scheduled_weights_serve_and_never_after_the_last():
    schedule = RunSchedule([scheduled(0, ((0, 1),)), scheduled(1, ((2, 1),), admitted=2)])
    schedule_replay = ScheduleReplay(schedule, session=name)
    await schedule_replay.may_admit(0)
    waits = [asyncio.create_task(schedule_replay.may_admit(number)) for number in (1, 2)]
    for update in (1, 2, 3):
        await asyncio.wait(waits, timeout=0.01)
        assert [wait.done() for wait in waits] == [update == 3, False]
        schedule_replay.loaded(update)
    waits[1].cancel()


async def test_weights_are_loaded_once_all_groups_before_them_are_admitted_and_sampled():
    schedule_replay = ScheduleReplay(RunSchedule([scheduled(0, ((0, 1),)), scheduled(1, ((0, 1),))]), session=name)
    load = asyncio.create_task(schedule_replay.may_load(1))
    for group in range(2):
        schedule_replay.admitted(Admission(group=group, prompt=group, admitted_version=0, admitted_update=0))
        await asyncio.sleep(0.01)
        assert not load.done()
        schedule_replay.ended(name(group, 0))
        await asyncio.sleep(0.01)
        assert load.done() == (group == 1)
