"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
RECIPES = sorted((ROOT / "recipes").glob("*/README.md"))
_FENCE = re.compile(r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$', re.M | re.S)

_PROGRAMS = "async-rl|make|pip|ray|docker|sbatch|srun|kubectl|hf|git|cd|for|source|tensorboard|uv|curl|export|apt-get"
_COMMAND = re.compile(rf"(\$ )?([A-Z_]+=\S+ )*((\S*/)?(python[\d.]*|{_PROGRAMS})|\.) ")


def name_of(page: Path) -> str:
    """Path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[tuple[str | None, str]]:
    """(title or None, code) of the Python blocks of a page, in order."""
    return [(match["title"], match["code"]) for match in _FENCE.finditer(text) if match["language"] in ("python", "py")]


def module_of(page: str, title: str) -> str:
    """The block `title` of a page, in any language."""
    return titled((ROOT / page).read_text())[title]


def titled(text: str) -> dict[str, str]:
    """The files that a page shows: title -> text of the block, in any language."""
    return {match["title"]: match["code"] for match in _FENCE.finditer(text) if match["title"]}


def commands(text: str) -> list[str]:
    """Shell commands of a page: those of its indented blocks, of its blocks of shell, and those in backticks.

    Lines that end with a backslash are joined; comments and prompts are left out.
    """
    shell = "".join(match["code"] for match in _FENCE.finditer(text) if match["language"] in ("bash", "sh", "console"))
    prose = _FENCE.sub("", text)
    indented = "\n".join(re.findall(r"^    +(.*)$", prose, re.M))
    lines = [line.strip() for line in re.sub(r"\\\n\s*", "", f"{shell}\n{indented}").splitlines()]
    inline = [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", prose)]
    found = [line for line in lines if _COMMAND.match(line)]
    found += [words for words in inline if re.match(r"(python -m|async-rl|make|pip install) [\w'.-]+", words)]
    return [re.split(r"\s{2,}#|\s#\s", line)[0].removeprefix("$ ").strip() for line in found]


def links(text: str) -> list[str]:
    """Targets of the links of a page that are no URL."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def paths(text: str) -> list[str]:
    """Files and folders of the repository that a page names in backticks, by their path from its root."""
    packages = "message_queue|agent_loop|async_rl|recipes|configs|benchmarks|tests|docs"
    named = re.findall(rf"`((?:{packages})/[\w./-]*)`", text)
    return [path.rstrip("/") for path in named]
