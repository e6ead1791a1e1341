"""Tools that run programs of the model in a sandbox: `Task(tools=[python_tool()], ...)`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

from agent_loop.boundary import slot
from agent_loop.tools.functions import FunctionTool
from agent_loop.tools.sandbox import SandboxLimits, SandboxResult, check_sandbox, run_python, run_shell
from message_queue.errors import RolloutError, SandboxError

LIMITS = SandboxLimits(output_bytes=20_000)


def python_tool(*, limits: SandboxLimits = LIMITS, at_once: int | None = None) -> FunctionTool:
    """The tool `python`: runs a program and shows its output and exit code. Calls have no common state.

    Args:
        limits: bounds on each call.
        at_once: calls that run at once in each rollout worker; None is the number of cores. Others wait, and
            `rollout.limits.tool_timeout_s` does not include the wait.

    Raises:
        SandboxError: programs cannot be isolated on this machine.
    """
    run = _runner(run_python, limits, at_once)

    async def python(code: str) -> str:
        """Runs a Python program and returns its output. Programs share no variables and no files, and have no network.

        Args:
            code: the whole program; it prints its results.
        """
        return await run(code)

    return FunctionTool(python)


def shell_tool(*, limits: SandboxLimits = LIMITS, at_once: int | None = None) -> FunctionTool:
    """The tool `shell`: runs a command and shows its output and exit code; see `python_tool`."""
    run = _runner(run_shell, limits, at_once)

    async def shell(command: str) -> str:
        """Runs a shell command and returns its output. Commands share no files and have no network.

        Args:
            command: one or more lines of shell.
        """
        return await run(command)

    return FunctionTool(shell)


def _runner(
    program: Callable[..., Awaitable[SandboxResult]], limits: SandboxLimits, at_once: int | None
) -> Callable[[str], Awaitable[str]]:
    check_sandbox()
    slots = asyncio.Semaphore(at_once or os.cpu_count() or 1)

    async def run(source: str) -> str:
        async with slot(slots):
            try:
                return _shown(await program(source, limits=limits), limits)
            except SandboxError as error:
                raise RolloutError(str(error)) from error

    return run


def _shown(result: SandboxResult, limits: SandboxLimits) -> str:
    """The text that the model reads: output, errors, and how the program ended unless that is exit code 0."""
    parts = [text.rstrip("\n") for text in (result.stdout, result.stderr) if text.strip()]
    if result.stopped:
        parts.append(f"[stopped: {result.stopped} is {getattr(limits, result.stopped):g}]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(parts) or "[no output]"
