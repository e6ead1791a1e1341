"""`async-rl COMMAND`: all commands of the project; `python -m async_rl COMMAND` is the same.

Exit codes: those of the command; 2 an unknown command, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from async_rl.files.command import end_process, prog

COMMANDS = {
    "run": ("async_rl.run", "train a model on a task; without arguments, a tiny one that learns to use a calculator"),
    "check": ("async_rl.run", "check a run without starting a process, and print its memory"),
    "evaluate": ("async_rl.evaluate", "roll out held-out prompts on a checkpoint or on the model of a run"),
    "export": ("async_rl.export", "make a Hugging Face checkpoint from a checkpoint of a run"),
    "report": ("async_rl.report", "draw the curves of one or several runs"),
    "view": ("async_rl.view", "show the rollouts of a run as a page"),
    "explain": ("async_rl.explain.__main__", "say what limited the throughput of a run, and what would help"),
    "plan": ("async_rl.plan.__main__", "say whether asynchronous training pays on a cluster, and with which split"),
    "simulate": ("async_rl.simulate", "run the control code under random schedules and faults, in virtual time"),
}
"""Name -> module with its `main(argv)`, and help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    name, *others = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0
    if name not in COMMANDS:
        is_override = "=" in name or name.startswith("-")
        nearest = "run" if is_override else get_close_matches(name, COMMANDS, n=1, cutoff=0)[0]
        sys.stderr.write(
            f"error: {name!r} is no command; did you mean {_called()} {nearest}? commands: {', '.join(COMMANDS)}\n"
        )
        return 2
    return import_module(COMMANDS[name][0]).main(["--check", *others] if name == "check" else others)


def script() -> None:
    """`main` as the process of the console script."""
    end_process("async_rl.__main__")


def _called() -> str:
    return prog("").rstrip(" .")


def _help() -> str:
    lines = (f"  {name:10}{text}\n" for name, (_, text) in COMMANDS.items())
    return (
        f"usage: {_called()} COMMAND [arguments]\n\nAsynchronous reinforcement learning for language models.\n\n"
        f"commands:\n{''.join(lines)}\n{_called()} COMMAND --help shows the arguments of a command.\n"
        "exit codes: 0 done, 1 failed, 2 refused as asked for, 130 stopped by Ctrl-C; --help of a command has more\n"
    )


if __name__ == "__main__":
    script()
