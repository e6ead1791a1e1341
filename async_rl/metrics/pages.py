"""Parts of HTML pages that open from disk: templates with `common.js`, and scripts that hold data and do not run."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

from agent_loop.text import safe_text

_FOLDER = Path(__file__).parent


def template(name: str) -> str:
    """Text of the template `name`.html, with the shared script."""
    common = (_FOLDER / "common.js").read_text(encoding="utf-8")
    text = (_FOLDER / f"{name}.html").read_text(encoding="utf-8")
    return text.replace("<!--common-->", f"<script>\n{common}</script>")


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
