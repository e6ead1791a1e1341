"""How a process was called as a command, and how it ends."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
EXIT_INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT
ON_STOP: list[Callable[[], None]] = []
"""Called if the process ends at once, where no `finally` is reached."""
CATCHING = {"_frozen_importlib", "importlib", "hydra", "omegaconf", "pydantic"}
"""Packages below whose functions a KeyboardInterrupt is caught and lost: modules that are imported do that."""


def words(command: str) -> list[str]:
    """Words that call a command from anywhere, in the way this process was called.

    `["/venv/bin/async-rl", "run"]`, `["/venv/bin/python", "-m", "async_rl", "run"]` or, if it is neither,
    `["/venv/bin/python", "-m", "async_rl.run"]`.
    """
    called = Path(sys.argv[0])
    if called.stem == "async-rl":
        return [str(called.absolute()), command]
    if called.name == "__main__.py" and called.parent.name == "async_rl":
        return [sys.executable, "-m", "async_rl", command]
    module = ["async_rl.run", "--check"] if command == "check" else [f"async_rl.{command}"]
    return [sys.executable, "-m", *module]


def prog(command: str) -> str:
    """The same for a person to read: without folders, as in `python -m async_rl.run`."""
    first, *others = words(command)
    return " ".join(["python" if first == sys.executable else Path(first).name, *others])


def end_process(module: str) -> NoReturn:
    """Run `main` of a module with the arguments of this process, and end the process with its exit code.

    Ctrl-C gives one line and EXIT_INTERRUPTED.

    The process ends without freeing its objects, after all that Python does at an exit: that takes up to seconds with
    torch and vLLM, and C++ modules, such as triton's, report each object that is still there as a leak.
    """
    code = EXIT_INTERRUPTED

    def leave() -> None:  # registered first, so all other functions of `atexit` were called before
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    atexit.register(leave)
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable
    try:
        code = import_module(module).main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
    except SystemExit as error:  # of argparse
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        code = 1
        raise  # a defect: Python shows where
    sys.exit(code)


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop; asyncio turns the first Ctrl-C into its cancel, so that it can clean up.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
    """
    import uvloop  # not for commands without a loop

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = sys.__unraisablehook__
    return uvloop.run(work)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Ctrl-C outside of an event loop."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in CATCHING:
            _stop_at_once()
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(found: sys.UnraisableHookArgs) -> None:
    """A KeyboardInterrupt that nothing can catch ends the process too."""
    if issubclass(found.exc_type, KeyboardInterrupt):
        _stop_at_once()
    sys.__unraisablehook__(found)


def _stop_at_once() -> NoReturn:
    for call in ON_STOP:
        call()
    sys.stderr.write("stopped\n")
    sys.stderr.flush()
    os._exit(EXIT_INTERRUPTED)
