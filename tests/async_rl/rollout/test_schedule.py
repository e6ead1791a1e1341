"""The schedule of a run: what is written down of it, and a run that keeps to it."""

import asyncio
import json
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.engine import GenerateRequest
from agent_loop.loop import Message, Prompt
from async_rl.rollout.schedule import (
    RunSchedule,
    ScheduledGroup,
    ScheduleError,
    read_schedule,
    scheduled_groups,
    spans_of,
)
from async_rl.rollout.schedule_replay import ScheduleReplay
from message_queue.contract import Admission
from message_queue.heads import head_of
from message_queue.tokens import StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import PromptGroup, Trajectory


def segment(version, tokens, stop=StopReason.ABORT):
    return TokenOutput(
        token_ids=np.full(tokens, 5, np.int32),
        logprobs=np.full(tokens, -1.0, np.float32),
        routed_experts=None,
        weights=WeightVersion(version, f"w{version}"),
        stop_reason=stop,
        replica="r",
    )


def trajectory(*turns):
    """Each turn: (version, tokens) of its segments."""
    made = Trajectory(routing=None)
    for turn in turns:
        made.observe(np.array([1, 2], np.int32))
        for version, tokens in turn:
            made.extend(segment(version, tokens))
    made.close(stop_reason=StopReason.STOP, reward=1.0)
    return made


def scheduled(group, *spans, prompt=None, admitted=0, step=1):
    return ScheduledGroup(
        group=group, prompt=group if prompt is None else prompt, admitted_update=admitted, train_step=step, spans=spans
    )


def test_spans_are_by_updates_and_join_over_turns_and_versions_of_the_same_update():
    made = trajectory([(0, 3), (1, 2)], [(1, 4), (2, 1)], [(4, 6)])
    group = PromptGroup(group=0, prompt=0, admitted_version=0, admitted_update=0, trajectories=[made])
    (head,) = head_of(group).trajectories
    segments = [(s.weights.version, len(s)) for s in made.segments]
    for sampled in (head.spans, [*segments, (2, 0)]):
        assert spans_of(sampled, {0: 0, 1: 2, 2: 2, 4: 5}) == ((0, 3), (2, 7), (5, 6))


def test_what_is_written_is_what_is_read(tmp_path):
    group = PromptGroup(
        group=7,
        prompt=3,
        admitted_version=1,
        admitted_update=2,
        trajectories=[trajectory([(1, 2)]), trajectory([(2, 1)])],
    )
    line = {"train_step": 1, "groups": scheduled_groups([head_of(group)], version_updates={1: 2, 2: 3})}
    (tmp_path / "schedule.jsonl").write_text(json.dumps(line) + "\n")
    for path in (tmp_path, tmp_path / "schedule.jsonl"):
        schedule = read_schedule(path)
        assert schedule.groups == (scheduled(7, ((2, 2),), ((3, 1),), prompt=3, admitted=2),)
        assert (schedule.train_steps, schedule.batch_groups, schedule.trajectories_per_group) == (1, 1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no schedule.jsonl to read"),
        ("{", "line 1 of .* is not a train step"),
        ('{"train_step": 1, "groups": [{"group": 1}]}', "line 1 of .* KeyError"),
        (
            '{"train_step": 2, "groups": [{"group": 0, "prompt": 0, "admitted_update": 0, "spans": []}]}',
            "steps .2.; need",
        ),
    ],
)
def test_a_schedule_that_cannot_be_read_names_file_and_cause(tmp_path, text, message):
    if text is not None:
        (tmp_path / "schedule.jsonl").write_text(text)
    with pytest.raises(ScheduleError, match=message):
        read_schedule(tmp_path)


def test_the_order_of_prompts_is_that_of_admission():
    schedule = RunSchedule([scheduled(9, ((0, 1),), prompt=4), scheduled(2, ((0, 1),), prompt=11)])

    class Order:
        def train_prompt(self, index):
            return Prompt(index=index, messages=(Message(role="user", content=f"{index}"),))

    order = schedule.order(Order())
    assert [(p.index, p.messages[0].content) for p in map(order.train_prompt, (0, 1))] == [(0, "11"), (1, "4")]


async def a_while(chance):
    for _ in range(chance.randint(0, 6)):
        await asyncio.sleep(0)


class Engine:
    """Samples until the budget, or until `lengths` of the session is reached."""

    def __init__(self, lengths, chance=None):
        self.version = 0
        self._chance = chance or random.Random(0)
        self.sampled = Counter()
        self.by_version = {}
        self._lengths = lengths

    async def generate(self, request):
        await a_while(self._chance)
        version, session = self.version, request.session
        left = self._lengths[session] - self.sampled[session]
        count = min(left, request.max_new_tokens)
        self.sampled[session] += count
        self.by_version.setdefault(session, Counter())[version] += count
        return [segment(version, count, StopReason.STOP if count == left else StopReason.LENGTH)]


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


async def conduct(schedule, engine, schedule_replay, *, updates, chance):
    """What a pipeline does, with a trainer that is always ready: (batches of positions, order of loads)."""
    loop = schedule_replay.loop(Loop(schedule_replay.engine(engine)))
    ready, batches = asyncio.Queue(), []

    async def roll(position):
        await asyncio.gather(
            *(
                loop.run(None, trajectory=None, session=name(position, number), cache_salt="")
                for number in range(schedule.trajectories_per_group)
            )
        )
        await schedule_replay.may_put(position)
        await ready.put(position)

    async def feed(rolls):
        for position in range(len(schedule.groups)):
            await a_while(chance)
            await schedule_replay.may_admit(position)
            schedule_replay.admitted(
                Admission(
                    group=position, prompt=position, admitted_version=engine.version, admitted_update=engine.version
                )
            )
            rolls.create_task(roll(position))

    async def train():
        for step in range(1, schedule.train_steps + 1):
            batches.append([await ready.get() for _ in range(schedule.batch_groups)])
            schedule_replay.taken()
            if step <= updates:
                asyncio.get_running_loop().create_task(load(step))

    async def load(update):
        await schedule_replay.may_load(update)
        engine.version = update
        schedule_replay.loaded(update)

    async with asyncio.timeout(2), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(tasks))
        tasks.create_task(train())
    return batches


@st.composite
def schedules(draw):
    """Of a run with a bound of three: each group trained within three updates of its admission."""
    steps, size = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    groups = []
    for step in range(1, steps + 1):
        for _ in range(size):
            admitted = draw(st.integers(max(0, step - 1 - 3), step - 1))
            spans = []
            for _ in range(2):
                updates = sorted(draw(st.sets(st.integers(admitted, step - 1), min_size=1, max_size=3)))
                spans.append(tuple((update, draw(st.integers(1, 9))) for update in updates))
            groups.append((admitted, draw(st.randoms()).random(), step, tuple(spans)))
    groups.sort(key=lambda group: group[:2])
    return RunSchedule(
        [scheduled(i, *spans, admitted=admitted, step=step) for i, (admitted, _, step, spans) in enumerate(groups)]
    )


@given(schedule=schedules(), seed=st.integers(0, 99))
def test_a_run_that_keeps_to_a_schedule_samples_and_trains_as_it_says(schedule, seed):
    chance = random.Random(seed)
    planned = {
        name(group.group, number): spans for group in schedule.groups for number, spans in enumerate(group.spans)
    }
    lengths = {session: max(1, sum(n for _, n in spans) + chance.randint(-6, 6)) for session, spans in planned.items()}
    engine = Engine(lengths, chance)
    schedule_replay = ScheduleReplay(schedule, session=name)
    batches = asyncio.run(conduct(schedule, engine, schedule_replay, updates=schedule.train_steps, chance=chance))
    steps = {group.group: group.train_step for group in schedule.groups}
    assert [[steps[g] for g in batch] for batch in batches] == [
        [step] * schedule.batch_groups for step in range(1, schedule.train_steps + 1)
    ]
    for session, spans in planned.items():
        expected, left = Counter(), lengths[session]
        for at, (update, tokens) in enumerate(spans):
            count = left if at == len(spans) - 1 else min(left, tokens)
            expected[update] += count
            left -= count
        assert +engine.by_version[session] == +expected


async def test_a_group_that_is_dropped_ends_the_run():
    schedule_replay = ScheduleReplay(RunSchedule([scheduled(0, ((0, 1),))]), session=name)
    with pytest.raises(ScheduleError, match="group 0 was dropped in a run that keeps to a schedule: too bad"):
        schedule_replay.dropped(0, reason="too bad")


async def test_a_restart_goes_on_within_the_spans():
    schedule = RunSchedule([scheduled(0, ((0, 4), (1, 5), (2, 3)), ((0, 4),), admitted=0)])
    schedule_replay = ScheduleReplay(schedule, session=name)
    open_one, closed = Trajectory(routing=None), trajectory([(0, 4)])
    open_one.observe(np.array([1], np.int32))
    for version, tokens in ((0, 4), (1, 2)):
        open_one.extend(segment(version, tokens))
    held = PromptGroup(group=0, prompt=0, admitted_version=0, admitted_update=0, trajectories=[open_one, closed])
    schedule_replay.begin([held], train_step=0, cursor=1, updates={0: 0, 1: 1})
    engine = Engine({name(0, 0): 50})
    engine.version = 1
    schedule_replay.loaded(1)
    going = asyncio.create_task(
        schedule_replay.loop(Loop(schedule_replay.engine(engine))).run(
            None, trajectory=None, session=name(0, 0), cache_salt=""
        )
    )
    await schedule_replay.may_load(2)
    engine.version = 2
    schedule_replay.loaded(2)
    await going
    assert engine.by_version[name(0, 0)] == {1: 3, 2: 47}
