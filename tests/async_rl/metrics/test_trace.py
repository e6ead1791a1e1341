"""The trace file: readable at any moment, continued by a restart, bounded, and connected by flows."""

import asyncio
import json

from agent_loop.timeline import TimeSpan, now
from async_rl.metrics import trace as module
from async_rl.metrics.trace import Trace, read_trace
from tests.helpers.traces import check_nesting


def spans_of(path):
    """Valid once the missing bracket is added, as the format says; the spans."""
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert events == read_trace(path)
    return [event for event in events if event["ph"] == "X"]


async def test_trace_is_valid_while_spans_end_and_is_written_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WRITE_EVERY_S", 0.0)
    path = tmp_path / "trace.json"
    trace = Trace(path)
    assert spans_of(path) == []
    waiting = trace.start("queue", group=1)
    with trace.span("train", step=1, groups=[1]):
        with trace.span("rollout", group=2), trace.span("rollout", group=3):
            assert spans_of(path) == []
        await asyncio.sleep(0)
        while len(spans_of(path)) < 2:  # noqa: ASYNC110 - a timer writes them
            await asyncio.sleep(0)
    trace.end(waiting)
    trace.write()
    spans = spans_of(path)
    check_nesting(spans)
    lanes = {span["name"]: span["tid"].removeprefix("controller ") for span in spans}
    assert lanes == {"rollout 2": "rollout 0", "rollout 3": "rollout 1", "train 1": "train 0", "queue 1": "queue 0"}


async def test_trace_of_a_killed_run_is_continued_on_the_same_clock(tmp_path):
    path = tmp_path / "trace.json"
    first, early = Trace(path), now()
    first.add("worker-0", [TimeSpan("tool", "rollout 0", early, now(), {"name": "add"})])
    first.write()
    content = path.read_bytes()
    path.write_bytes(content + content.splitlines()[-1][:20])  # the kill came during a write
    second = Trace(path)
    second.add("worker-0", [TimeSpan("tool", "rollout 0", early, now(), {"name": "sub"})])
    second.write()
    add, sub = spans_of(path)
    assert (add["name"], sub["name"]) == ("tool add", "tool sub") and add["ts"] == sub["ts"]
    path.write_text('{"traceEvents": []}')  # another program's
    Trace(path)
    assert spans_of(path) == [] and "traceEvents" in (tmp_path / "trace-earlier.json").read_text()


async def test_trace_keeps_the_newest_spans_within_its_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 2_000)
    path, warnings = tmp_path / "trace.json", []
    trace = Trace(path, warn=warnings.append)
    for step in range(100):
        with trace.span("validate", step=step):
            pass
        trace.write()
        assert spans_of(path)[-1]["args"] == {"step": step}
    files = list(tmp_path.iterdir())
    assert len(files) == 2 and all(file.stat().st_size < 2_500 for file in files)
    path.unlink()
    path.mkdir()
    for _ in range(2):
        with trace.span("validate", step=0):
            pass
        trace.write()
    assert len(warnings) == 1 and str(path) in warnings[0]
