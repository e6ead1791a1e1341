"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NOT_RUN = "<!-- not run -->"
_FENCE = re.compile(
    r'^(?P<before>[^\n]*)\n```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$', re.M | re.S
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced Python block."""

    code: str
    """Text of the block."""
    title: str | None
    """File that the block is; None for a script."""
    run: bool
    """Whether the tests run it."""


def name_of(page: Path) -> str:
    """Path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page, in order."""
    return [
        Block(code=match["code"], title=match["title"], run=match["before"] != NOT_RUN)
        for match in _FENCE.finditer(text)
        if match["language"] in ("python", "py")
    ]


def module_of(page: str, title: str) -> str:
    """The block `title` of a page, in any language."""
    (code,) = [match["code"] for match in _FENCE.finditer((ROOT / page).read_text()) if match["title"] == title]
    return code


def commands(text: str) -> list[list[str]]:
    """Words of each `python -m` and `make` command in the indented blocks of a page; comments are left out."""
    indented = re.sub(r"\\\n\s*", "", text)
    lines = re.findall(r"^    +(?:\w+=\S+ )*((?:python -m|make) .*)$", indented, re.M)
    return [shlex.split(line.partition("  #")[0]) for line in lines]


def links(text: str) -> list[str]:
    """Targets of the links of a page that are no URL."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def paths(text: str) -> list[str]:
    """Files and folders of the repository that a page names in backticks, by their path from its root."""
    named = re.findall(
        r"`((?:message_queue|agent_loop|async_rl|recipes|configs|benchmarks|tests|docs)/[\w./-]*)`", text
    )
    return [path.rstrip("/") for path in named]
