"""Parts of HTML pages that open from disk: templates with `common.html`, and scripts that hold data and do not run."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_loop.text import safe_text

_FOLDER = Path(__file__).parent


def template(name: str) -> str:
    """Text of the template `name`.html, with the shared style and script."""
    common, text = ((_FOLDER / f"{each}.html").read_text(encoding="utf-8") for each in ("common", name))
    return text.replace("<!--common-->", common)


def json_script(name: str, value: Any) -> str:
    """A script with JSON, whatever texts it has.

    Raises:
        ValueError: a number is not finite.
    """
    text = safe_text(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    return f'<script type="application/json" id="{name}">{text.replace("<", chr(92) + "u003c")}</script>\n'


def packed_script(name: str, data: bytes) -> str:
    """A script with base64 of gzip."""
    coded = base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{coded}</script>\n'


async def write_rollouts_page(directory: Path, *, warn: Callable[[str], None]) -> None:
    """Write `rollouts.html` of a run in a process with a low priority, so that the run does not wait for it.

    Args:
        warn: called with a text if the page cannot be written.
    """
    command = ["nice", "-n", "19", sys.executable, "-m", "async_rl.view", str(directory)]
    try:
        process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=PIPE, start_new_session=True)
    except OSError as error:
        return warn(f"rollouts.html is not renewed: {error}")
    try:
        _, errors = await process.communicate()
        if process.returncode:
            warn(f"rollouts.html is not renewed: {errors.decode(errors='replace').strip()}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
