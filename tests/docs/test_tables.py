"""Tables of the documentation name settings, metrics and messages that exist."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import is_dataclass
from typing import get_args, get_type_hints

import pytest

from async_rl import Task
from async_rl.config import CONFIGS, RunConfig
from async_rl.metrics.registry import METRICS
from tests.docs.pages import ROOT

PACKAGES = ("agent_loop", "async_rl", "message_queue")
VALIDATION = {"validation/success", "validation/failed", "validation/pass_at_K"}


def known_option(key: str) -> bool:
    """Whether a Hydra override of `key` sets a group of configs or a field of RunConfig."""
    if (CONFIGS / key).is_dir():
        return True
    kinds = [RunConfig]
    for name in key.lstrip("+~").split("."):
        hints = [get_type_hints(kind)[name] for kind in kinds if name in kind.__dataclass_fields__]
        if not hints:
            return False
        kinds = [kind for hint in hints for kind in (hint, *get_args(hint)) if is_dataclass(kind)]
        if not kinds:  # a value, or a mapping with its own keys
            return True
    return True


def rows(page: str, *, columns: int) -> list[list[str]]:
    """Cells of the tables of a page that have this many columns, without their heads."""
    lines = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
    return [row for row in cells if len(row) == columns]


def in_code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def messages_of_the_code() -> list[str]:
    """All texts in the packages, with `…` where an f-string has a value."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


@pytest.mark.parametrize("row", rows("coming_from.md", columns=2), ids=lambda row: row[0])
def test_the_settings_here_of_a_table_exist(row):
    for code in in_code(row[1]):
        if match := re.match(r"Task\((.*)\)$", code):
            assert set(re.findall(r"(\w+)=", match[1])) <= set(inspect.signature(Task.__init__).parameters), code
        elif re.fullmatch(r"[\w.]+=[\w.]+", code) and "NAME" not in code:
            key, _, value = code.partition("=")
            assert known_option(key), code
            if (CONFIGS / key).is_dir():
                assert (CONFIGS / key / f"{value}.yaml").is_file(), code
        elif re.fullmatch(r"[a-z_.]+", code) and code != "completion.stop_reason":
            assert known_option(code), code


def test_every_message_of_the_page_of_troubles_is_one_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Messages of other programs")[0]
    messages = [code for line in page.splitlines() if line.startswith("| `") for code in in_code(line.split(" | ")[0])]
    texts = messages_of_the_code()
    assert len(messages) > 30
    assert [message for message in messages if not any(message in text for text in texts)] == []


def test_the_settings_of_the_page_of_troubles_exist():
    ways_out = [code for row in rows("troubleshooting.md", columns=3) for code in in_code(row[2])]
    keys = [match[1] for code in ways_out if (match := re.fullmatch(r"([a-z_]+\.[a-z_.]+)(=.*)?", code))]
    settings = [key for key in keys if key.split(".")[0] in RunConfig.__dataclass_fields__]
    assert len(settings) > 10
    assert [key for key in settings if not known_option(key)] == []


def test_the_metrics_of_the_page_exist_and_every_family_is_there():
    page = (ROOT / "docs" / "metrics.md").read_text()
    table = rows("metrics.md", columns=3)
    families = {key.partition("/")[0] for key in METRICS}
    named = {code.partition("/")[0] for row in table for code in in_code(row[0])}
    assert families <= named
    keys = set(re.findall(r"`([a-z_]+/[\w]+)`", page)) - VALIDATION
    assert sorted(key for key in keys if key not in METRICS and not key.startswith("info/")) == []
    for row in table:  # a key without its family is one of the family of the row
        short = {code for cell in row[1:] for code in in_code(cell) if re.fullmatch(r"[a-z_0-9]+", code)}
        kinds = [code.partition("/")[0] for code in in_code(row[0])]
        assert short <= {key.rpartition("/")[2] for key in METRICS if key.partition("/")[0] in (*kinds, key)}, row
