"""Settings are frozen dataclasses that refuse a value outside of the bounds in their annotations."""

from __future__ import annotations

import math
import operator
import typing
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform

from annotated_types import Ge, Gt, Le, Lt

T = TypeVar("T")
Count = Annotated[int, Ge(1)]
"""A number of things, at least one."""
Seconds = Annotated[float, Gt(0), Lt(math.inf)]
"""A finite time."""
_SIGNS = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}
_HOLDS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def bounded(section: str = "") -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass whose objects have checked values.

    With section="engine", a field `replicas: Annotated[int, Ge(1)]` refuses 0: "engine.replicas is 0; must be >= 1". A
    field with literals refuses other values. Rules over several fields are in `__post_init__`, called after the checks.
    Pydantic checks the same annotations if it builds the object, and then names the whole path of the field.
    """
    prefix = f"{section}." if section else ""

    def decorate(kind: type[T]) -> type[T]:
        rules = getattr(kind, "__post_init__", None)

        def check(made: T) -> None:
            for name, hint in _hints(type(made)).items():
                if rule := _broken_rule(hint, value := getattr(made, name)):
                    raise ValueError(f"{prefix}{name} is {value!r}; must be {rule}")
            if rules is not None:
                rules(made)

        cast(Any, kind).__post_init__ = check
        return dataclass(frozen=True, slots=True, kw_only=True)(kind)

    return decorate


def bounds_of(hint: Any) -> list[tuple[str, float]]:
    """Signs and limits in an annotation: `Annotated[float, Gt(0), Le(1)] | None` has (">", 0) and ("<=", 1)."""
    found = (bound for member in _members(hint) for bound in getattr(member, "__metadata__", ()))
    return [(_SIGNS[type(bound)], astuple(bound)[0]) for bound in found if type(bound) in _SIGNS]


def _broken_rule(hint: Any, value: Any) -> str:
    """Text of the bounds that `value` exceeds; "" if it exceeds none, or is None."""
    members = [member for member in _members(hint) if member is not type(None)]
    if value is None:
        return ""
    if all(typing.get_origin(member) is Literal for member in members):
        choices = [choice for member in members for choice in typing.get_args(member)]
        return "" if value in choices else f"one of {', '.join(map(str, choices))}"
    bounds = bounds_of(hint)
    holds = all(_HOLDS[sign](value, limit) for sign, limit in bounds)
    return "" if holds else " and ".join(f"{sign} {limit:g}" for sign, limit in bounds)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Annotations of the fields of a dataclass, inherited ones included."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in fields(kind)}


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
