"""How a run was started: one line of `starts.jsonl` per start."""

from __future__ import annotations

import contextlib
import json
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

STARTS = "starts.jsonl"
"""Name of the file in the run directory."""
_PACKAGE = Path(__file__).parent.parent


def record_start(directory: Path, *, command: str, train_step: int) -> None:
    """Append when, from where and from which code a run was started.

    `commit` is that of the working directory, `async_rl` the installed version and the commit of a checkout.

    Args:
        command: shell command that continues the run, without secrets.
        train_step: train steps done before.
    """
    own = _commit(_PACKAGE) if (_PACKAGE.parent / ".git").exists() else None
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "train_step": train_step,
        "command": command,
        "commit": _commit(Path.cwd()),
        "async_rl": " ".join(filter(None, (version("async-rl"), own))),
    }
    with (directory / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")


def _commit(folder: Path) -> str | None:
    """Commit of the checkout that a folder is in, `1f2e3d4c5b6a-dirty` with changes; None if there is none."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    return None
