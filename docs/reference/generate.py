"""Writes the reference of config keys and of metrics, and counts the lines of the reading path: `make reference`.

The texts of the reference are docstrings and the registry. The reading path is a table of docs/architecture.md.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from agent_loop.bounds import bounds_of
from async_rl.config import CONFIGS, RunConfig, preset_names
from async_rl.metrics.registry import METRICS

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
CONFIG_HEAD = """\
# Config keys

Written by `docs/reference/generate.py` from the docstrings of the dataclasses. `KEY=VALUE` on the command line sets any
of them; the defaults are those of the dataclasses, which a preset may replace (`python -m async_rl.run --show` prints
the values of a run).
"""
METRICS_HEAD = """\
# Metrics

Written by `docs/reference/generate.py` from `async_rl/metrics/registry.py`. They are the keys of `metrics.jsonl`, which
has an object for each batch. The reduction says how values of several steps become one. Further keys are `info/NAME`,
the mean of `NAME` of `Trajectory.info`, and `routing/..._layerN`, a routing metric of layer N.
"""


_PATH_ROW = re.compile(r"^(\| `([\w/]+\.py)` \| ((?:`[\w.]+`(?:, )?)+) \| )\d+ \| \d+ \|")


class PathRow(NamedTuple):
    """A file of the reading path in docs/architecture.md."""

    text: str
    """Line of the page."""
    file: str
    """Path from the root of the repository."""
    names: tuple[str, ...]
    """Definitions to read: `function`, `Class` or `Class.method`."""


def config_page() -> str:
    """The page of config keys: presets, then a table for each config class."""
    groups = "".join(
        f"| `{folder.name}` | {', '.join(f'`{name}`' for name in names)} |\n"
        for folder in sorted(CONFIGS.iterdir())
        if (names := preset_names(folder))
    )
    presets = f"## Presets\n\n`GROUP=NAME` chooses one.\n\n| group | names |\n|---|---|\n{groups}"
    return "\n".join([CONFIG_HEAD, presets, *_sections(RunConfig, "", "Run")])


def metrics_page() -> str:
    """The page of metrics, in the order of the registry."""
    rows = "".join(
        f"| `{key}` | {metric.unit or '-'} | {metric.reduction} | {_cell(metric.meaning)} |\n"
        for key, metric in METRICS.items()
    )
    return f"{METRICS_HEAD}\n| key | unit | reduction | meaning |\n|---|---|---|---|\n{rows}"


def architecture_page() -> str:
    """docs/architecture.md with the lines of its reading path counted."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    read = of = 0
    for row in reading_path(page):
        definitions = definitions_of(row.file)
        own = sum(len(definitions[name].splitlines()) for name in row.names)
        whole = len((ROOT / row.file).read_text(encoding="utf-8").splitlines())
        read, of = read + own, of + whole
        page = page.replace(row.text, _PATH_ROW.sub(rf"\g<1>{own} | {whole} |", row.text))
    return re.sub(r"(?m)^\| in all \| \| [\d,]+ \| [\d,]+ \|", f"| in all | | {read:,} | {of:,} |", page)


def reading_path(page: str) -> list[PathRow]:
    """The rows of the reading path of docs/architecture.md, in order."""
    found = [(line, _PATH_ROW.match(line)) for line in page.splitlines()]
    return [
        PathRow(text=line, file=match[2], names=tuple(re.findall(r"`([\w.]+)`", match[3])))
        for line, match in found
        if match
    ]


def definitions_of(file: str) -> dict[str, str]:
    """`function`, `Class` and `Class.method` -> source, of a module of the repository."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}

    def add(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[f"{prefix}{node.name}"] = "\n".join(lines[start - 1 : node.end_lineno])
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{prefix}{node.name}.")

    add(ast.parse("\n".join(lines)).body, "")
    return found


PAGES = {"config.md": config_page, "metrics.md": metrics_page, "../architecture.md": architecture_page}


def _sections(kind: type[Any], prefix: str, title: str, *, nests: bool = True) -> Iterator[str]:
    """The table of a config class, then those of its fields that are config classes.

    Args:
        nests: whether those have tables; else each is a row that says what it is.
    """
    texts, hints, bounds = _field_texts(kind), get_type_hints(kind), get_type_hints(kind, include_extras=True)
    rows: list[str] = []
    tables: list[str] = []
    nested: list[tuple[type[Any], str, str]] = []
    for field in fields(kind):
        hint = hints[field.name]
        members = [m for m in get_args(hint) or (hint,) if is_dataclass(m) and nests]
        if get_origin(hint) is Mapping and members:
            below = f"{prefix}{field.name}.NAME"
            tables += _sections(members[0], f"{below}.", below, nests=False)
            members = []
        for member in members:
            tag = "" if len(members) == 1 else f" ({member.__dataclass_fields__['name'].default})"
            nested.append((member, f"{prefix}{field.name}.", f"{prefix}{field.name}{tag}"))
        if not members:
            value = ", ".join(
                [_default(field), *(f"{sign} {limit:g}" for sign, limit in bounds_of(bounds[field.name]))]
            )
            rows.append(f"| `{prefix}{field.name}` | {value} | {_cell(texts[field.name])} |\n")
    if rows:
        summary = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        yield f"## {title}\n\n{summary}\n\n| key | default, bounds | meaning |\n|---|---|---|\n{''.join(rows)}"
    for member, below, name in nested:
        yield from _sections(member, below, name)
    yield from tables


def _field_texts(kind: type[Any]) -> dict[str, str]:
    """Field -> its docstring, of a dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
                found[node.target.id] = inspect.cleandoc(ast.literal_eval(after.value))
    return found


def _default(field: Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is MISSING:
        return "required"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else "empty"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    """Write the pages."""
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
