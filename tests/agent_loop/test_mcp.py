"""MCP servers as tools, with real servers over pipes and HTTP: state, errors, death, and no process that remains."""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from agent_loop.engine import SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools import mcp as own
from agent_loop.tools.functions import open_tools
from agent_loop.tools.mcp import McpServer
from agent_loop.tools.tool import PauseGate, ToolCall, ToolRunner
from async_rl import Task
from message_queue.errors import RolloutError, StateLostError
from tests.agent_loop.mcp_servers import HUGE
from tests.agent_loop.test_loops import TOKENIZER

pytest.importorskip("mcp", reason="mcp is not installed")
SERVERS = str(Path(__file__).with_name("mcp_servers.py"))
PROMPT = Prompt(index=3, messages=(Message(role="user", content="6*7="),))
LIFE = """
import asyncio, sys
from agent_loop.tools.mcp import McpServer

async def main():
    async with McpServer(*sys.argv[1:]).opened(None, timeout_s=60) as [tool]:
        print(await tool({}), flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def alive(pids):
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def servers():
    """Servers of this file, with their guards and children, whoever is their parent."""
    return {one.pid for one in psutil.process_iter(["cmdline"]) if SERVERS in (one.info["cmdline"] or ())}


@pytest.fixture(autouse=True)
def nothing_remains():
    before, files = servers(), len(list(Path("/proc/self/fd").iterdir()))
    yield
    while alive(servers() - before):  # they are being killed; the time-out of the test bounds the wait
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) <= files + 4  # of the event loop


@functools.cache
def full(**options):
    return McpServer(sys.executable, SERVERS, "stdio", **options)


def bare(kind, **options):
    return McpServer(sys.executable, SERVERS, "bare", kind, **options)


@contextlib.contextmanager
def over_http():
    """A server, and a function that ends it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.fileno()
        process = subprocess.Popen([sys.executable, SERVERS, "http", str(number)], pass_fds=(number,))

        def end():
            process.kill()
            process.wait()
            listening.close()

        yield McpServer(url=f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"), end
        end()


@pytest.fixture(scope="module")
def http_server():
    with over_http() as (server, _):
        yield server


@pytest.fixture(params=["pipes", "http"])
def server(request, http_server):
    return full() if request.param == "pipes" else http_server


def opened_tools(server, *, timeout_s=60.0):
    return open_tools(ToolRunner([], timeout_s=timeout_s), [server], PROMPT, timeout_s=60)


async def calls(server, *made, timeout_s=60.0, rollouts=1):
    """Replies to calls of one rollout, one after the other; (text, failed) each."""

    async def rollout():
        async with opened_tools(server, timeout_s=timeout_s) as tools:
            found = [(await tools.run([ToolCall(name, arguments)]))[0] for name, arguments in made]
        return [(reply.text, reply.failed) for reply in found]

    found = await asyncio.gather(*(rollout() for _ in range(rollouts)))
    return found[0] if rollouts == 1 else found


ADD = ("add", {"x": 2})


def test_tools_of_a_server_are_described_to_the_model():
    described = {tool.name: tool for tool in full().tools}
    assert described["add"].description == "Adds to the sum of the session."
    assert described["add"].parameters["properties"]["x"]["type"] == "integer"
    assert [tool.name for tool in full(only=("fail",)).tools] == ["fail"]


async def test_each_rollout_has_a_state_of_its_own(server):
    assert await calls(server, ADD, ADD, rollouts=2) == [[("2", False), ("4", False)]] * 2


async def test_rollouts_share_the_connection_of_a_shared_server():
    server = bare("fine", shared=True)
    first, second = await calls(server, ("tool", {}), ("tool", {}), rollouts=2)
    assert first == second and len({text for text, _ in first}) == 1
    assert await calls(server, ("tool", {})) != first[:1], "it was closed after the last rollout"


async def test_calls_of_one_turn_are_made_in_their_order():
    async with opened_tools(full()) as tools:
        replies = await tools.run([ToolCall("add", {"x": x, "after_s": s}) for x, s in ((1, 0.3), (2, 0.0))])
    assert [reply.text for reply in replies] == ["1", "3"]


async def test_errors_of_a_tool_and_of_the_arguments_are_shown_to_the_model(server):
    failed, wrong, unknown = await calls(server, ("fail", {}), ("add", {"x": "two"}), ("add", {}))
    assert failed[1] and "no such row" in failed[0]
    assert wrong[1] and "integer" in wrong[0] and unknown[1]


async def test_images_are_named_and_text_of_any_size_is_read():
    image, huge = await calls(full(), ("show", {"kind": "image"}), ("show", {"kind": "huge"}))
    assert image == ("[image of type image/png, which is not shown]", False)
    assert (len(huge[0]), huge[1]) == (HUGE, False)


async def test_a_server_inherits_no_secret_but_the_variables_it_is_given(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    server = McpServer(sys.executable, SERVERS, "stdio", env={"GIVEN": "given"})
    asked = [("variable", {"name": name}) for name in ("API_KEY", "GIVEN")]
    assert await calls(server, *asked) == [("absent", False), ("given", False)]


async def test_a_resumed_rollout_starts_over_unless_the_server_is_repeatable():
    for server, lost in ((full(), True), (full(repeatable=True), False), (full(shared=True), False)):
        async with opened_tools(server) as tools:
            turns = ['<tool_call>{"name": "add", "arguments": {"x": 2}}</tool_call>'] * 2
            if lost:
                with pytest.raises(StateLostError, match="add"):
                    await tools.rebuild(turns)
                continue
            await tools.rebuild(turns)
            [reply] = await tools.run([ToolCall("add", {"x": 1})])
            assert reply.text == ("1" if server.repeatable is None else "5")


# ---- servers that misbehave


async def test_a_dead_server_fails_the_rollout_with_its_last_words_and_not_the_next_one():
    with pytest.raises(RolloutError, match=r"die.*last words"):
        await calls(full(), ADD, ("die", {}))
    assert await calls(full(), ADD) == [("2", False)]


async def test_a_shared_server_that_died_is_restarted_for_the_next_call():
    server = full(shared=True)
    async with opened_tools(server) as tools:
        with pytest.raises(RolloutError, match="die"):
            await tools.run([ToolCall("die", {})])
        [reply] = await tools.run([ToolCall("add", {"x": 1})])
        assert (reply.text, reply.failed) == ("1", False)


async def test_a_server_that_is_gone_fails_the_rollout_over_http():
    with over_http() as (server, end):
        async with opened_tools(server) as tools:
            await tools.run([ToolCall("add", {"x": 1})])
            end()
            for _ in range(2):
                with pytest.raises(RolloutError, match="mcp server http"):
                    await tools.run([ToolCall("add", {"x": 1})])


@pytest.mark.parametrize("kind", ["floods", "line without end"])
async def test_a_server_that_floods_its_output_fails_the_rollout(kind):
    with pytest.raises(RolloutError, match="bytes"):
        await calls(bare(kind), ("tool", {}))


async def test_lines_that_are_no_messages_are_passed_over():
    [(text, failed)] = await calls(bare("noisy"), ("tool", {}))
    assert not failed and text.isdigit()


async def test_a_server_that_hangs_is_a_failed_call_and_ends_with_the_rollout(server):
    [(text, failed)] = await calls(server, ("hang", {}), timeout_s=0.5)
    assert failed and "0.5 s" in text


async def test_a_cancelled_rollout_ends_its_server():
    reached = asyncio.Event()

    async def rollout():
        async with bare("stubborn").opened(PROMPT, timeout_s=60) as [tool]:
            await tool({})
            reached.set()
            await asyncio.sleep(1000)

    before, task = servers(), asyncio.create_task(rollout())
    await reached.wait()
    assert len(alive(servers() - before)) == 3  # the guard, the server and its child
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_group_of_a_server_dies_with_a_worker_that_is_killed():
    worker = subprocess.Popen(
        [sys.executable, "-c", LIFE, sys.executable, SERVERS, "bare", "stubborn"], stdout=subprocess.PIPE
    )
    server = int(worker.stdout.readline())
    group = os.getpgid(server)
    members = [one.pid for one in psutil.process_iter() if psutil.pid_exists(one.pid) and os.getpgid(one.pid) == group]
    assert len(alive(members)) == 3
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    while alive(members):
        pass


def test_a_task_takes_a_server_beside_other_tools():
    def double(x: int) -> int:
        """Doubles."""
        return 2 * x

    task = Task(prompts=["q"], rewards=lambda completion: 0.0, tools=[double, bare("fine")])
    limits = TurnLimits(max_turns=2, max_tokens=50)
    loop = task.build_loop(engine=None, tokenizer=TOKENIZER, sampling=SamplingConfig(), limits=limits, gate=PauseGate())
    assert isinstance(loop, ToolUseLoop)
    task.train_prompt(0)


@pytest.mark.parametrize(
    ("command", "options", "named"),
    [
        (("no-such-program",), {}, "no-such-program: No such file"),
        ((sys.executable, "-c", "raise SystemExit('no key')"), {}, "no key"),
        ((), {"url": "http://127.0.0.1:9/mcp"}, "127.0.0.1:9"),
        ((), {}, "url"),
        (("a",), {"url": "http://b"}, "url"),
        (("a",), {"shared": True, "repeatable": True}, "repeatable"),
        (("a",), {"headers": {"b": "c"}}, "headers"),
        ((sys.executable, SERVERS, "bare", "fine"), {"only": ["absent"]}, "absent.*tool"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(command, options, named):
    with pytest.raises(ValueError, match=named):
        McpServer(*command, **options)


def test_a_server_that_lists_nothing_in_time_is_refused(monkeypatch):
    monkeypatch.setattr(own, "LIST_S", 0.2)
    with pytest.raises(ValueError, match=r"0\.2 s"):
        McpServer("sleep", "1000")
