"""Errors of a user's code, with the line of the user."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_OWN = tuple(str(Path(__file__).resolve().parent.parent / name) for name in ("agent_loop", "async_rl", "message_queue"))


def user_line(error: BaseException) -> str:
    """`file:line in function` of the innermost frame outside of libraries and of this project; "" if there is none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_LIBRARIES, *_OWN, "<"))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


class DescribedError(Exception):
    """An error in another process. Its text is that of `describe_error` there, as the frames do not travel."""


def describe_error(error: BaseException) -> str:
    """`ValueError: text (file:line in function)`, on one line."""
    if isinstance(error, DescribedError):
        return str(error)
    line = user_line(error)
    return " ".join(f"{type(error).__name__}: {error}".split()) + (f" ({line})" if line else "")
