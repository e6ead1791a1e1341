"""The config of a run in its directory: that of the first start, and one more for each start that changed it.

config.yaml           of the first start
config-000020.yaml    of the steps after 20, because the start that resumed from step 20 changed something
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from async_rl.config import RunConfig, plain_values
from async_rl.files.atomic_dir import whole_file
from async_rl.files.masking import masked

FIRST = "config.yaml"
NOT_COMPARED = frozenset({"resume"})  # it says how to start, not what to run


def record_config(directory: Path, config: RunConfig, *, train_step: int) -> list[str]:
    """Write the config if it is the first or differs from the newest one.

    Args:
        train_step: step that the run resumes from. Configs of later steps are removed: their steps are repeated.

    Returns:
        `field: old -> new` of each field that changed since the last start.
    """
    current = plain_values(config)
    if not (directory / FIRST).exists():
        _write(directory / FIRST, current)
        return []
    recorded = [directory / FIRST, *sorted(directory.glob("config-??????.yaml"))]
    changed = [f"{name}: {old} -> {new}" for name, old, new in _differences(_read(recorded[-1]), current)]
    later = [path for path in recorded[1:] if path > _path_of(directory, train_step)]
    for path in later:
        path.unlink()
    newest = [path for path in recorded if path not in later][-1]
    if any(_differences(_read(newest), current)):
        _write(_path_of(directory, train_step), current)
    return changed


def another_run(config: RunConfig) -> Iterator[str]:
    """Why this run cannot continue the run in `output_dir`: that has another task or model."""
    directory = config.output_dir
    started = any(directory.glob("journal/*.sqlite")) or any(directory.glob("checkpoints/step-*"))
    if not started or not (directory / FIRST).is_file():
        return
    recorded, current = _read(newest_config(directory)), plain_values(config)
    for section, field in (("task", "factory"), ("model", "checkpoint")):
        old, new = recorded.get(section, {}).get(field), current[section][field]
        if Path(old or "").name != Path(new or "").name:
            yield (
                f"output_dir is {directory}, which holds a run with {section}.{field}={old}, and this one has {new}; "
                "give another output_dir, or remove that run"
            )


def newest_config(directory: Path) -> Path:
    """File of the config that the last start of the run in `directory` used.

    Raises:
        ValueError: there is none.
    """
    recorded = [path for path in (directory / FIRST, *sorted(directory.glob("config-??????.yaml"))) if path.is_file()]
    if not recorded:
        raise ValueError(f"{directory} has no {FIRST}; give the output_dir of a run that was started")
    return recorded[-1]


def _path_of(directory: Path, train_step: int) -> Path:
    """Of the config of the steps after `train_step`."""
    return directory / f"config-{train_step:06d}.yaml"


def _write(path: Path, values: Mapping[str, Any]) -> None:
    with whole_file(path) as file:
        file.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _read(path: Path) -> Mapping[str, Any]:
    """Values of a config; none if it is not YAML any more, so that each field counts as changed."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        values = None
    return masked(values) if isinstance(values, Mapping) else {}


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted field, old value, new value) of the fields that differ; "-" for a field that is missing."""
    for key in dict.fromkeys((*old, *new)):
        before, after, name = old.get(key), new.get(key), f"{prefix}{key}"
        if name in NOT_COMPARED or (before == after and (key in old) == (key in new)):
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(cast(Mapping[str, Any], before), cast(Mapping[str, Any], after), f"{name}.")
        else:
            yield name, _shown(old, key), _shown(new, key)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "-"
