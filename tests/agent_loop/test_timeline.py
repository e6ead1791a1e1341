"""Time spans: lanes of nested and of overlapping ones, and what belongs to a rollout."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from agent_loop.timeline import Timeline, enclosing, record, timed
from tests.helpers.traces import check_nesting


def events_of(spans):
    return [{"pid": "p", "tid": s.lane, "ts": s.started, "dur": s.ended - s.started} for s in spans]


@given(st.lists(st.integers(0, 5), max_size=60))
def test_timeline_keeps_spans_of_a_lane_apart_or_nested(choices):
    timeline, rollouts, inner, begun = Timeline("rollout"), [], [], 0
    for choice in choices:  # 0: end a span in a rollout, 1: end a rollout without spans, else: start one
        rollout = rollouts[choice % len(rollouts)] if rollouts else None
        if choice == 0 and inner:
            timeline.end(inner.pop(0)[1])
        elif choice == 1 and rollout is not None and rollout not in [outer for outer, _ in inner]:
            rollouts.remove(rollout)
            timeline.end(rollout)
        elif choice > 3 and rollout is not None:
            inner.append((rollout, timeline.start("tool", inside=rollout)))
            begun += 1
        else:
            rollouts.append(timeline.start("trajectory"))
            begun += 1
    for span in [*(span for _, span in inner), *rollouts]:
        timeline.end(span)
    spans = timeline.take()
    assert len(spans) == begun and not timeline.take()
    check_nesting(events_of(spans))
    assert len({span.lane for span in spans}) <= begun


async def test_spans_of_tasks_belong_to_the_rollout_that_started_them():
    timeline, both = Timeline("rollout"), asyncio.Barrier(2)

    async def tool(name):
        with timed("tool", name=name) as args:
            await both.wait()
            args["seen"] = True

    async def roll(number):
        with timeline.span("trajectory", group=7, trajectory=number) as span, enclosing(span):
            async with asyncio.TaskGroup() as tools:
                tools.create_task(tool("a"))
                tools.create_task(tool("b"))
            record("reward", span.started)
        with timed("tool", name="outside"):
            pass

    for number in range(2):
        await roll(number)
    spans = timeline.take()
    tools = sorted((span for span in spans if span.kind == "tool"), key=lambda span: span.started)
    assert [span.args for span in tools] == [
        {"group": 7, "trajectory": number, "name": name, "seen": True} for number in range(2) for name in "ab"
    ]
    assert [span.lane for span in tools] == ["rollout 0", "rollout 1"] * 2
    assert [span.lane for span in spans if span.kind != "tool"] == ["rollout 0"] * 4
