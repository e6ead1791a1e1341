"""Tools with a state: one object for each rollout, closed however it ends, and rebuilt when it is resumed."""

import asyncio
import functools
import threading

import pytest

from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.tools.functions import ToolClass, open_tools
from agent_loop.tools.tool import ToolCall, ToolRunner
from async_rl.rollout.content.writer import ContentWriter
from async_rl.rollout.recorded import RolloutLog
from async_rl.rollout.rollouter import FailureConfig, Rollouter
from message_queue.errors import RolloutError, StateLostError
from message_queue.trajectory import Trajectory
from tests.agent_loop import test_loops
from tests.agent_loop.test_loops import ids, make_engine, rebuilt, text_of, turn
from tests.helpers.fakes import SPEC, FakeReward, FakeTool
from tests.helpers.stored import RUN, admission, read

PROMPT = Prompt(index=3, messages=(Message(role="user", content="6*7="),), target={"start": 10})
LIMITS = TurnLimits(max_turns=6, max_tokens=400, tool_timeout_s=2.0)


def call(name, **arguments):
    shown = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{shown}}}}}\n</tool_call>'


TURNS = (turn(call("add", x=1)), turn(call("add", x=2) + call("add", x=4)), turn("17"))
ADD_3 = ToolCall("add", {"x": 3})


class Sum:
    """A running sum. `events` are of all objects."""

    events: list[str]

    async def open(self, start, prompt):
        self.total = start
        self.events.append(f"open {prompt.index}")

    def add(self, x: int) -> int:
        """Adds to the sum."""
        self.total += x
        return self.total

    def close(self):
        self.events.append(f"close {self.total}")


class OpenSum(Sum):
    async def open(self, start):
        self.total = start

    async def close(self):
        self.events.append(f"close {self.total}")


def fresh(made=Sum, **members):
    """The class with its own events."""
    return type("Sum", (made,), {"events": [], **members})


def make_loop(made, engine, **options):
    return test_loops.make_loop(engine, sources=[ToolClass(made)], limits=LIMITS, **options)


async def roll(loop, session="s"):
    trajectory = Trajectory(routing=SPEC)
    await loop.run(PROMPT, trajectory=trajectory, session=session, cache_salt="v0")
    return trajectory


recorded = functools.partial(test_loops.recorded, prompt=PROMPT)


def replies_in(trajectory):
    return [text.partition("\n</tool_response>")[0] for text in text_of(trajectory).split("<tool_response>\n")[1:]]


@pytest.mark.parametrize("made", [Sum, OpenSum])
async def test_each_rollout_has_an_object_of_its_own(made):
    made = fresh(made)
    loop = make_loop(made, make_engine(*TURNS))
    for found in await asyncio.gather(*(roll(loop, f"s{number}") for number in range(3))):
        assert replies_in(found) == ["11", "13", "17"] and found.info["tool_errors"] == 0
    assert made.events.count("close 17") == 3


async def test_the_object_is_open_until_the_reward_is_there():
    made = fresh()

    class Reward:
        async def score(self, prompt, *, completion):
            made.events.append("reward")
            return 1.0

    await roll(make_loop(made, make_engine(*TURNS), reward=Reward()))
    assert made.events == ["open 3", "reward", "close 17"]


@pytest.mark.parametrize("where", ["tool", "engine", "reward"])
async def test_close_runs_if_the_rollout_is_cancelled(where):
    reached = asyncio.Event()

    async def add(self, x: int) -> int:
        """Adds."""
        reached.set()
        await asyncio.sleep(30)
        return x

    made = fresh(**({"add": add} if where == "tool" else {}))
    engine = make_engine(*TURNS, token_s=30.0 if where == "engine" else 0.0)
    reward = FakeReward(seconds=30)
    rollout = asyncio.create_task(roll(make_loop(made, engine, reward=reward)))
    there = {"tool": reached.is_set, "engine": lambda: engine.in_flight, "reward": lambda: reward.seen}[where]
    while not there():  # noqa: ASYNC110 - the fakes have no event for it
        await asyncio.sleep(0)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert [event.partition(" ")[0] for event in made.events] == ["open", "close"]


@pytest.mark.parametrize("failing", ["open", "add", "close"])
async def test_close_runs_if_a_hook_or_a_tool_fails_and_the_line_is_named(failing, caplog):
    def fails(self):
        self.events.append(failing)
        raise KeyError("absent") if failing != "add" else RolloutError("out of order")

    fails.__doc__, fails.__name__, members = "Fails.", failing, {failing: fails}
    made = fresh(**members)
    made.total = 0
    rollout = roll(make_loop(made, make_engine(turn(call("add")), turn("17"))))
    place = f"test_stateful.py:{fails.__code__.co_firstlineno + 2} in fails"
    if failing == "close":
        assert (await rollout).reward == 1.0
        assert place in caplog.text
        return
    with pytest.raises(RolloutError, match="out of order" if failing == "add" else place):
        await rollout
    assert made.events[-2:] == [failing, "close 0" if failing == "open" else "close 10"]


async def test_calls_of_one_object_wait_for_each_other_even_in_threads():
    release, running = threading.Event(), []

    def add(self, x: int) -> int:
        """Adds."""
        running.append(x)
        release.wait(10)
        return x

    runner = ToolRunner([], timeout_s=0.1)
    async with open_tools(runner, [ToolClass(fresh(add=add))], PROMPT, timeout_s=2) as tools:
        replies = [*await tools.run([ToolCall("add", {"x": x}) for x in (1, 2)]), *await tools.run([ADD_3])]
        assert all(reply.failed for reply in replies) and running == [1]
        release.set()
        while [reply.text for reply in await tools.run([ADD_3])] != ["3"]:  # the first one ends
            pass
        assert running[-1] == 3


@pytest.mark.parametrize("repeatable", [True, False])
async def test_a_resumed_rollout_has_its_state_or_is_refused(repeatable):
    records = []
    whole = await recorded(make_loop(fresh(), make_engine(*TURNS)), Trajectory(routing=SPEC), records)
    started = [at for at, (_, record) in enumerate(records) if type(record).__name__ == "CallStarted"]
    assert len(started) == 2
    for cut in range(len(records)):
        held = rebuilt(records[:cut])
        if cut - 1 in started:
            held.unsure_call = "add"
        loop = make_loop(fresh(repeatable=repeatable), make_engine(*TURNS))
        if repeatable or cut <= started[0]:
            found = await recorded(loop, held, [])
            assert found.token_ids().tolist() == whole.token_ids().tolist(), cut
        else:
            with pytest.raises(StateLostError, match="add"):
                await recorded(loop, held, [])
            assert len(held) == len(rebuilt(records[:cut]))


async def test_other_tools_are_not_called_when_a_state_is_rebuilt():
    records, tool = [], FakeTool(behave=lambda _: "42")
    turns = (turn(call("tool") + call("add", x=1)), turn(call("add", x=2) + call("tool")), turn("17"))
    await recorded(make_loop(fresh(), make_engine(*turns), tool=tool), Trajectory(routing=SPEC), records)
    last = max(at for at, (_, record) in enumerate(records) if type(record).__name__ == "CallStarted")
    held, again = rebuilt(records[: last + 1]), FakeTool(behave=lambda _: "42")
    held.unsure_call = "add, tool"
    found = await recorded(make_loop(fresh(repeatable=True), make_engine(*turns), tool=again), held, [])
    replies = replies_in(found)
    assert not again.calls and replies[:3] == ["42", "11", "13"] and "interrupted" in replies[3]


async def test_a_rollout_without_its_state_starts_over_and_its_records_follow(tmp_path):
    writer = await ContentWriter.open(tmp_path, name="rollout-0000", run=RUN, fsync=False)
    notes, scores = [], iter([ValueError("no score"), None])

    class Reward:
        async def score(self, prompt, *, completion):
            if (error := next(scores)) is not None:
                raise error
            return 0.5

    rollouter = Rollouter(
        loop=make_loop(fresh(), make_engine(*TURNS), reward=Reward()),
        routing=SPEC,
        trajectories_per_group=1,
        failure=FailureConfig(max_retries=1),
        log=RolloutLog(writer),
        note=notes.append,
    )
    group = await rollouter.roll(PROMPT, admission(0))
    await writer.close()
    sampled = sum(len(ids(text)) for text in TURNS)
    assert group.trajectories[0].reward == 0.5 and group.num_tokens == rollouter.tokens.pop(0) == sampled
    assert any(f"starts over, without {sampled} tokens" in note.text for note in notes)
    found = read(tmp_path, 0, routing=SPEC)
    assert not found.notes
    assert found.groups[0].trajectories[0].token_ids().tolist() == group.trajectories[0].token_ids().tolist()


class NoTool:
    def open(self): ...


class Static:
    @staticmethod
    def add(x: int) -> int:
        """Adds."""
        return x


class NoDocstring:
    def add(self, x: int) -> int:
        return x


@pytest.mark.parametrize(("made", "named"), [(NoTool, "NoTool"), (Static, "Static"), (NoDocstring, "add")])
def test_a_class_that_cannot_be_a_tool_is_refused(made, named):
    with pytest.raises(ValueError, match=named):
        ToolClass(made)


def test_a_partial_of_a_class_is_a_class_and_open_names_its_columns():
    class Counter(Sum):
        def __init__(self, step):
            self.step = step

    made = ToolClass(functools.partial(Counter, 3))
    assert made.name == "Counter" and [tool.name for tool in made.tools] == ["add"]
    assert made.tools[0].parameters["required"] == ["x"] and list(made.tools[0].parameters["properties"]) == ["x"]
    made.check({"start": 1})
    with pytest.raises(ValueError, match="start"):
        made.check({"begin": 1})


async def test_arguments_of_a_method_are_checked_and_the_model_reads_what_is_wrong():
    async with open_tools(ToolRunner([], timeout_s=2), [ToolClass(fresh())], PROMPT, timeout_s=2) as tools:
        [wrong, right] = await tools.run([ToolCall("add", {"x": "one"}), ToolCall("add", {"x": "1"})])
    assert wrong.failed and wrong.text.startswith("error: x:") and (right.failed, right.text) == (False, "11")
