"""An experiment: axes of overrides, and one run for each combination."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from async_rl.config import RECIPES, ConfigError, recipe_overrides

FOLDER = Path(__file__).parent / "experiments"
SEED = "seed"
_ODD = re.compile(r"[^\w.]+")

Axis = Mapping[str, tuple[str, ...]]
"""Label -> overrides."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """One run."""

    labels: Mapping[str, str]
    """Axis -> label."""
    overrides: tuple[str, ...]
    """Overrides `key=value` of this cell alone."""
    schedule: str | None = None
    """Name of the cell whose schedule it follows; None if its own is free."""

    @property
    def name(self) -> str:
        """Name of the directory, such as `max_staleness_3-loss_ppo_clip-seed_0`."""
        return _name(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Axes with their labels, and the overrides that all cells share."""

    name: str
    """Name of the file."""
    axes: Mapping[str, Axis]
    """The first axis is the one from left to right in the figure; means are taken over the axis `seed`."""
    overrides: tuple[str, ...]
    """Overrides of every cell."""
    control: str | None = None
    """Label of the first axis that is synchronous training."""
    target: float | None = None
    """Held-out success whose time is measured; None if no times are."""
    same_schedule: str | None = None
    """Axis whose cells all follow the schedule of the one with the first label: same ages, same aborts."""

    def cells(self) -> Iterator[Cell]:
        """All cells; those of one seed follow each other, so that an interrupted experiment has whole seeds.

        The cell of a schedule is before those that follow it.
        """
        names = sorted(self.axes, key=lambda name: name != SEED)
        for labels in itertools.product(*(self.axes[name] for name in names)):
            chosen = dict(zip(names, labels, strict=True))
            of_axes = {name: chosen[name] for name in self.axes}
            overrides = itertools.chain.from_iterable(self.axes[name][label] for name, label in of_axes.items())
            yield Cell(labels=of_axes, overrides=tuple(overrides), schedule=self._schedule(of_axes))

    def _schedule(self, labels: Mapping[str, str]) -> str | None:
        """Name of the cell whose schedule the cell with these labels follows."""
        axis = self.same_schedule
        if axis is None or labels[axis] == (first := next(iter(self.axes[axis]))):
            return None
        return _name({**labels, axis: first})

    def changed(self, words: Sequence[str]) -> Experiment:
        """The experiment with overrides of the command line.

        `axis=label,label` chooses labels, and `key=value,value` gives an axis other values, or is a further axis. All
        other overrides apply to every cell.

        Raises:
            ConfigError: an override cannot be parsed, names the run, or chooses a label that the axis lacks.
        """
        axes, common = dict(self.axes), list(self.overrides)
        for word in words:
            key, values = _parsed(word)
            if key in ("name", "output_dir"):
                raise ConfigError(f"{word} would be the same for all cells; leave it out, --out names the folder")
            of_key = [name for name, axis in axes.items() if _key(axis) == key]
            if key in axes and not of_key:
                if unknown := [value for value in values if value not in axes[key]]:
                    raise ConfigError(f"{word}: {unknown[0]!r} is none of {', '.join(axes[key])}")
                axes[key] = {value: axes[key][value] for value in values}
            elif of_key or len(values) > 1:
                axes[of_key[0] if of_key else key.rpartition(".")[2]] = _axis(key, values)
            else:
                common.append(word)
        return replace(self, axes=axes, overrides=tuple(common))


def experiments() -> list[str]:
    """Names of the experiments."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_experiment(name: str) -> Experiment:
    """The experiment of a file.

    Its `axes` are overrides with values, or labels with overrides; its `overrides` follow those of its `recipe`.

    Raises:
        ConfigError: there is no such experiment.
    """
    path = FOLDER / f"{name}.yaml"
    if not path.exists():
        raise ConfigError(f"there is no experiment {name!r}; choose one of {', '.join(experiments())}")
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    axes = {
        name: _axis(*_parsed(axis)) if isinstance(axis, str) else {str(k): tuple(v) for k, v in axis.items()}
        for name, axis in found["axes"].items()
    }
    recipe = recipe_overrides(RECIPES / found["recipe"] / "recipe.yaml") if "recipe" in found else []
    control, target = found.get("control"), found.get("target")
    return Experiment(
        name=name,
        axes=axes,
        overrides=(*(word for word in recipe if not word.startswith("name=")), *found["overrides"]),
        control=None if control is None else str(control),
        target=target,
        same_schedule=found.get("same_schedule"),
    )


def _name(labels: Mapping[str, str]) -> str:
    return "-".join(f"{axis}_{_ODD.sub('_', label)}" for axis, label in labels.items())


def _axis(key: str, values: Sequence[str]) -> Axis:
    return {value: (f"{key}={value}",) for value in values}


def _key(axis: Axis) -> str | None:
    """Key of an axis whose labels are the values of one key."""
    keys = {word.partition("=")[0] for label, words in axis.items() for word in words if word.endswith(f"={label}")}
    return keys.pop() if len(keys) == 1 and all(len(words) == 1 for words in axis.values()) else None


def _parsed(word: str) -> tuple[str, list[str]]:
    """Key and values of an override, by Hydra's grammar of sweeps.

    Raises:
        ConfigError: it is no override.
    """
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(f"{word!r} is no override: {str(error).splitlines()[0]}") from error
    if override.is_sweep_override():
        return override.key_or_group, [str(value) for value in override.sweep_string_iterator()]
    return override.key_or_group, [override.get_value_element_as_str()]
