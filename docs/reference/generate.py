"""Writes the reference of config keys and of metrics: `make reference`. The texts are docstrings and the registry."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from async_rl.config import CONFIGS, RunConfig, preset_names
from async_rl.metrics.registry import METRICS

FOLDER = Path(__file__).parent
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


PAGES = {"config.md": config_page, "metrics.md": metrics_page}


def _sections(kind: type[Any], prefix: str, title: str) -> Iterator[str]:
    """The table of a config class, then those of its fields that are config classes."""
    texts, hints = _field_texts(kind), get_type_hints(kind)
    rows: list[str] = []
    nested: list[tuple[type[Any], str, str]] = []
    for field in fields(kind):
        members = [m for m in get_args(hints[field.name]) or (hints[field.name],) if is_dataclass(m)]
        for member in members:
            tag = "" if len(members) == 1 else f" ({member.__dataclass_fields__['name'].default})"
            nested.append((member, f"{prefix}{field.name}.", f"{prefix}{field.name}{tag}"))
        if not members:
            rows.append(f"| `{prefix}{field.name}` | {_default(field)} | {_cell(texts[field.name])} |\n")
    if rows:
        summary = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        yield f"## {title}\n\n{summary}\n\n| key | default | meaning |\n|---|---|---|\n{''.join(rows)}"
    for member, below, name in nested:
        yield from _sections(member, below, name)


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
