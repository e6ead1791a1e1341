"""Config classes (frozen dataclasses) as nested mappings: their keys, defaults and paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from async_rl.files.user_code import user_class

Config = TypeVar("Config")


def with_absolute_paths(config: Config) -> Config:
    """The config with each path, at any depth, resolved against the working directory of this process."""
    changed: dict[str, Any] = {}
    for name in (f.name for f in fields(cast(Any, config))):
        value = getattr(config, name)
        if isinstance(value, Path):
            changed[name] = value.expanduser().absolute()
        elif is_dataclass(value):
            changed[name] = with_absolute_paths(value)
        elif isinstance(value, Mapping) and any(map(is_dataclass, members := cast(Mapping[str, Any], value).values())):
            changed[name] = dict(zip(value, map(with_absolute_paths, members), strict=True))
    return replace(cast(Any, config), **changed)


def with_defaults(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` of a config class, with the defaults of the fields that they leave out.

    Raises:
        ValueError: a user's class cannot be imported.
    """
    hints = get_type_hints(kind)
    found = {f.name: default for f in fields(kind) if (default := _default_of(f)) is not MISSING} | dict(values)
    for key, value in values.items():
        if isinstance(value, Mapping) and key in hints:
            for name, member, within in _members(hints[key], cast(Mapping[str, Any], value), key=key):
                whole = with_defaults(member, within)
                found[key] = whole if name is None else {**found[key], name: whole}
    return found


def _default_of(field: Field[Any]) -> Any:
    """The default of a dataclass's field as a plain value, or MISSING."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def unknown_keys(
    kind: type[Any], values: Mapping[str, Any], *, prefix: str = "", root: type[Any] | None = None
) -> Iterator[str]:
    """Keys that no field takes, dotted, each with the nearest key or the keys at its place.

    Args:
        kind: config class of `values`.
        prefix: place of `values` in those of `root`, with a dot at its end.
        root: config class whose keys are hints; None for `kind`.

    Raises:
        ValueError: a user's class cannot be imported.
    """
    root = root or kind
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    for key, value in values.items():
        if key not in known:
            yield f"{prefix}{key} {_nearest(key, known, prefix=prefix, root=root)}"
        elif isinstance(value, Mapping):
            place = f"{prefix}{key}"
            for name, member, within in _members(hints[key], cast(Mapping[str, Any], value), key=place):
                below = f"{place}." if name is None else f"{place}.{name}."
                yield from unknown_keys(member, within, prefix=below, root=root)


def _nearest(key: str, known: Sequence[str], *, prefix: str, root: type[Any]) -> str:
    """A hint at the key that was meant: one of the same name elsewhere, or of a similar name at this place."""
    same = [dotted for dotted in all_keys(root) if dotted.rpartition(".")[2] == key]
    if same := [dotted for dotted in same if dotted.rpartition(".")[0] != prefix.rstrip(".")]:
        return f"(did you mean {' or '.join(same)}?)"
    if similar := get_close_matches(key, known, n=1, cutoff=0.7):
        return f"(did you mean {prefix}{similar[0]}?)"
    return f"(known here: {', '.join(known)})"


def all_keys(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys of all fields of a config class, in order; of alternatives, those of each, once.

    A name that the user chooses is NAME: `teachers.NAME.checkpoint`.
    """
    hints = get_type_hints(kind)
    for name in (f.name for f in fields(kind)):
        yield f"{prefix}{name}"
        if (member := _class_of_values(hints[name])) is not None:
            yield from all_keys(member, f"{prefix}{name}.NAME.")
            continue
        members = [m for m in get_args(hints[name]) or (hints[name],) if is_dataclass(m)]
        yield from dict.fromkeys(key for m in members for key in all_keys(cast(Any, m), f"{prefix}{name}."))


def _members(
    hint: Any, values: Mapping[str, Any], *, key: str
) -> Iterator[tuple[str | None, type[Any], Mapping[str, Any]]]:
    """(name, config class, values) of each config that a field holds; the name is None unless it is a mapping's."""
    if (member := _class_of_values(hint)) is not None:
        yield from ((n, member, cast(Mapping[str, Any], v)) for n, v in values.items() if isinstance(v, Mapping))
    else:
        yield from ((None, kind, values) for kind in _config_classes(hint, values, key=key))


def _class_of_values(hint: Any) -> type[Any] | None:
    """The config class of the values of a mapping; None if they have none."""
    return next(filter(is_dataclass, get_args(hint)[1:]), None) if get_origin(hint) is Mapping else None


def _config_classes(hint: Any, values: Mapping[str, Any], *, key: str) -> list[type[Any]]:
    """The config class that `values` are of; of several, the one whose name they carry, or a user's class."""
    members: list[type[Any]] = [m for m in get_args(hint) or (hint,) if isinstance(m, type) and is_dataclass(m)]
    if len(members) > 1:
        if ":" in (name := str(values.get("name"))):
            base = next(kind for kind in members[0].__mro__ if all(issubclass(member, kind) for member in members))
            return [user_class(name, key=key, kind=base)]
        members = [m for m in members if cast(Any, m).__dataclass_fields__["name"].default == values.get("name")]
    return members
