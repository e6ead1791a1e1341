"""Tools that run programs of the model: the text that it reads, and the bound on calls at once."""

import pytest

from agent_loop.tools import program_tools
from agent_loop.tools.program_tools import python_tool, shell_tool
from agent_loop.tools.sandbox import SandboxLimits, check_sandbox
from agent_loop.tools.tool import ToolCall, ToolRunner
from async_rl import Task
from message_queue.errors import RolloutError, SandboxError

try:
    check_sandbox()
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)


async def shown(tool, **arguments):
    [reply] = await ToolRunner([tool], timeout_s=60).run([ToolCall(tool.name, arguments)])
    assert not reply.failed
    return reply.text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "[no output]"),
        ("import sys\nprint('a')\nsys.exit('b')", "a\nb\n[exit code 1]"),
        ("import time\nprint('a', flush=True)\ntime.sleep(1000)", "a\n[stopped: wall_s is 5]"),
        ("while True: print('y' * 9)", ("y" * 9 + "\n") * 10 + "[stopped: output_bytes is 100]"),
    ],
    ids=["output", "nothing", "exit code", "stopped", "flood"],
)
async def test_the_python_tool_shows_output_and_end(code, text):
    assert await shown(python_tool(limits=SandboxLimits(wall_s=5, output_bytes=100)), code=code) == text


async def test_the_shell_tool_shows_output_and_calls_share_no_files():
    tool = shell_tool()
    assert await shown(tool, command="echo a > file; cat file; false") == "a\n[exit code 1]"
    assert await shown(tool, command="ls") == "[no output]"


async def test_calls_beyond_the_bound_wait(monkeypatch):
    running, most = 0, 0

    async def program(source, *, limits):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        result = await run(source, limits=limits)
        running -= 1
        return result

    run = program_tools.run_python
    monkeypatch.setattr(program_tools, "run_python", program)
    tool = python_tool(at_once=2)
    await ToolRunner([tool], timeout_s=60).run([ToolCall("python", {"code": "print(1)"})] * 5)
    assert most == 2


async def test_a_sandbox_that_fails_fails_the_rollout(monkeypatch):
    tool = python_tool()
    monkeypatch.setenv("PATH", "/absent")
    with pytest.raises(RolloutError, match="bubblewrap"):
        await shown(tool, code="print(1)")


def test_both_tools_are_given_to_a_task_and_described():
    task = Task(prompts=["q"], rewards=lambda completion: 0.0, tools=[python_tool(), shell_tool()])
    described = {tool.name: list(tool.parameters["properties"]) for tool in task._described}
    assert described == {"python": ["code"], "shell": ["command"]}
