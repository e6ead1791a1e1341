"""Hydra composes the presets of `configs/` (only differences from the defaults) with the overrides of the command line.

A wrong value is refused before any process starts, with the field, the value and the way out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from async_rl.config.schema import ConfigError, RunConfig
from async_rl.files.command import prog
from async_rl.files.config_classes import unknown_keys, with_absolute_paths, with_defaults
from async_rl.files.masking import MASK, hidden, masked
from async_rl.files.validation import explain
from async_rl.weights.model_settings import RESOLVERS, local_checkpoint

_PACKAGE = Path(__file__).resolve().parents[1]
_FILES = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent  # an installed wheel or a checkout
CONFIGS, RECIPES = _FILES / "configs", _FILES / "recipes"
SYNCHRONOUS, MAX_STALENESS = "staleness=synchronous", "staleness.max_staleness="
"""An override that fixes the bound on staleness, and the start of those that set it."""
GROUP_SIZES = ("rollout.groups_per_batch=", "rollout.trajectories_per_group=")
"""Starts of the overrides that a preset of `configs/algorithm` has too."""
SHARED_BY_TEACHERS = ("name", "device", "dtype")
"""Fields of `engine` that the engine of a teacher has too if it does not give them."""
_FIELD = re.compile(r"(?!hydra\b)\w+(\.\w+)*")  # name of a field in an override


def load_config(overrides: Sequence[str], *, config_name: str = "run", config_dir: Path = CONFIGS) -> RunConfig:
    """Compose `config_name` with Hydra overrides and check everything that can be checked without a process.

    Raises:
        ConfigError: one line per problem.
    """
    return build_config(composed_values(overrides, config_name=config_name, config_dir=config_dir))


def composed_values(
    overrides: Sequence[str], *, config_name: str = "run", config_dir: Path = CONFIGS
) -> dict[str, Any]:
    """Plain values for `build_config` to check: `config_name` with Hydra overrides.

    An override `a.b=value` may name any field, whether or not a preset does. A field without a value has its default
    before interpolations are resolved, so that `${a.b}` may name any field too.

    Raises:
        ConfigError: an override that cannot be read, or a value that is missing.
    """
    config_dir = config_dir.absolute()
    try:
        _check_overrides(overrides, config_dir)
        overrides = [*_model_choice(overrides, config_dir), *overrides]
        for name, function in RESOLVERS.items():
            OmegaConf.register_new_resolver(name, function, replace=True)
        with initialize_config_dir(str(config_dir), version_base="1.3"):
            composed = compose(config_name, overrides=[_forced(word, config_dir) for word in overrides])
        given = cast(dict[str, Any], OmegaConf.to_container(composed))
        given = _with_teacher_engines(given)
        teachers = {f"teachers.{name}": teacher for name, teacher in (given.get("teachers") or {}).items()}
        for key, values in {"model": given.get("model"), "critic": given.get("critic"), **teachers}.items():
            if isinstance(values, dict) and isinstance(checkpoint := values.get("checkpoint"), str):
                values["checkpoint"] = _local(f"{key}.checkpoint", checkpoint)
        whole = OmegaConf.create(with_defaults(RunConfig, given))
        return cast(dict[str, Any], OmegaConf.to_container(whole, resolve=True, throw_on_missing=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _model_choice(overrides: Sequence[str], config_dir: Path) -> list[str]:
    """The preset for checkpoints if `overrides` give one and choose no preset of the model themselves."""
    is_chosen = any(word.startswith("model=") for word in overrides) or not _has_checkpoint(overrides)
    has_preset = (config_dir / "model" / "hugging_face.yaml").is_file()
    return ["model=hugging_face"] if has_preset and not is_chosen else []


def _has_checkpoint(overrides: Sequence[str]) -> bool:
    given = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("model.checkpoint=")]
    return bool(given) and given[-1] != "null"


def _local(key: str, checkpoint: str) -> str:
    """A checkpoint's folder; a missing value and an interpolation stay as they are."""
    if checkpoint.startswith("${") or checkpoint == "???":
        return checkpoint
    try:
        return str(local_checkpoint(checkpoint, key=key))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def plain_values(config: RunConfig) -> dict[str, Any]:
    """All values of a config with the types of YAML, to show or to store: paths are text, secrets are masked."""
    return masked(json.loads(json.dumps(asdict(config), default=str)))


def recipe_overrides(recipe: Path, overrides: Sequence[str] = ()) -> list[str]:
    """Overrides of a `recipe.yaml`, with its list `tiny_model` if no checkpoint is given.

    Args:
        overrides: given next to the recipe. With `staleness=synchronous` the recipe's own bound is left out, and with
            `algorithm=NAME` its sizes of groups and batches, because an algorithm has its own.

    Raises:
        ConfigError: no such file, or one without a list of overrides.
    """
    try:
        found = yaml.safe_load(recipe.read_text())
        own = [*found["overrides"], *(() if _has_checkpoint(overrides) else found.get("tiny_model", ()))]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--recipe: {recipe} is not a recipe with a list `overrides` ({error!r}); use one of "
            f"{', '.join(sorted(path.parent.name for path in RECIPES.glob('*/recipe.yaml')))}"
        ) from error
    left_out = (MAX_STALENESS,) if SYNCHRONOUS in overrides else ()
    if any(word.startswith("algorithm=") for word in overrides):
        left_out = (*left_out, *GROUP_SIZES)
    return [str(each) for each in own if not str(each).startswith(left_out)]


def build_config(values: Mapping[str, Any]) -> RunConfig:
    """Typed RunConfig from plain values.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, or an impossible combination.
    """
    values = _with_derived(values)
    try:
        unknown = list(unknown_keys(RunConfig, values))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if unknown:
        raise ConfigError(f"unknown config key: {', '.join(unknown)}")
    if lacking := list(hidden(values)):
        raise ConfigError(
            f"{', '.join(lacking)}: {MASK} stands for a value that records of runs do not hold; give the value, as in "
            f"{lacking[0]}='${{oc.env:VARIABLE}}'"
        )
    try:
        return with_absolute_paths(TypeAdapter(RunConfig).validate_python(values))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(e, values=values) for e in error.errors())) from error


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    return dict(cast(Mapping[str, Any], section)) if isinstance(section, Mapping) else {}


def _sections(values: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """The sections of a mapping of them; only those that are sections."""
    section: Mapping[str, Any] = values.get(name) or {}
    return {key: dict(each) for key, each in section.items() if isinstance(each, dict)}


def _with_teacher_engines(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, where the engine of a teacher has what it does not give: the fields SHARED_BY_TEACHERS of `engine`, and
    the length of the longest rollout and one token more."""
    engine, teachers = _section(values, "engine"), _sections(values, "teachers")
    shared = {key: engine[key] for key in SHARED_BY_TEACHERS if key in engine}
    shared["max_model_len"] = "${teacher_length:${engine.max_model_len},${rollout.limits.max_tokens}}"
    made = {name: {**each, "engine": shared | _section(each, "engine")} for name, each in teachers.items()}
    return {**values, **({"teachers": {**values["teachers"], **made}} if teachers else {})}


def _with_derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, in which engines whose device is `auto` are on a GPU if one is reserved for them.

    A schedule over the updates of a phase without updates is constant: no update asks it.
    """
    found, warm = dict(values), _section(values, "warm_start")
    for phase, updates in ((found, found.get("total_train_steps")), (warm, warm.get("steps"))):
        optimizer = _section(phase, "optimizer")
        if updates == 0 and optimizer.get("decay_steps") == 0:
            phase["optimizer"] = optimizer | {"decay": "constant"}
    engine, cluster = _section(found, "engine"), _section(found, "cluster")
    gpus = cluster.get("gpus_per_rank"), cluster.get("gpus_per_replica")
    if engine.get("device", "auto") == "auto" and all(isinstance(number, int | float | None) for number in gpus):
        reserved = gpus[0] or 0 if gpus[1] is None else gpus[1]
        engine["device"] = "cuda" if reserved > 0 else "cpu"
    for teacher in (teachers := _sections(found, "teachers")).values():
        teacher["engine"] = of_teacher = _section(teacher, "engine")
        if of_teacher.get("device", "auto") == "auto":
            of_teacher["device"] = engine.get("device", "auto")
    found |= {"teachers": {**found["teachers"], **teachers}} if teachers else {}
    return found | {name: made for name, made in (("engine", engine), ("warm_start", warm)) if name in found}


def preset_names(folder: Path) -> list[str]:
    """Names of the presets in a folder of configs."""
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _check_overrides(overrides: Sequence[str], config_dir: Path) -> None:
    """Refuse presets that do not exist, and several values for one key."""
    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"{word!r} is not an override; write key=value")
        try:
            parsed = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise ConfigError(
                f"{word!r} is not an override: {_one_line(error)}; quote the value, 'key=\"value\"'"
            ) from error
        name, _, value = word.partition("=")
        if parsed.is_sweep_override():
            values = value.split(",") if isinstance(parsed.value(), ChoiceSweep) and "(" not in value else ["..."]
            raise ConfigError(
                f"{word} has several values, and a run has one of each; start a run for each value: for value in "
                f"{' '.join(values)}; do {prog('run')} {name}=$value name=run-$value; done"
            )
        if word.startswith(MAX_STALENESS) and SYNCHRONOUS in overrides and value != "0":
            raise ConfigError(
                f"{word} with {SYNCHRONOUS}, where each batch is sampled by the weights that it trains; leave "
                "out one of them, or use staleness=wait"
            )
        folder = config_dir / name
        if _FIELD.fullmatch(name) and folder.is_dir() and value not in (known := [*preset_names(folder), "null"]):
            similar = get_close_matches(value, known, n=1)
            hint = f"did you mean {name}={similar[0]}? " if similar else ""
            raise ConfigError(f"{name} is {value!r}, which is no preset; {hint}use one of {', '.join(known[:-1])}")


def _forced(override: str, config_dir: Path) -> str:
    """`seed=4` -> `++seed=4`, which needs no preset that names the field; choices of presets and `+` stay."""
    name, is_set, _ = override.partition("=")
    return f"++{override}" if is_set and _FIELD.fullmatch(name) and not (config_dir / name).is_dir() else override


def _one_line(error: Exception) -> str:
    """Hydra's first line, and its hint on how to add a key left out: unknown keys are refused here."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is missing; give it a value"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [
        line for line in lines if not line.startswith(("To append", "Set the environment", "full_key", "object_type"))
    ]
    where = f"{error.full_key}: " if isinstance(error, OmegaConfBaseException) and error.full_key else ""
    return f"{where}{' '.join(kept) or repr(error)}"
