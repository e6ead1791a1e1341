"""Text of pydantic's errors: field, value and reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

MAX_INPUT_CHARS = 200
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def explain(error: Any, *, prefix: str = "", values: Mapping[str, Any] | None = None) -> str:
    """One entry of `ValidationError.errors()` as `field is value: reason`.

    Args:
        error: the entry.
        prefix: written before the field's path.
        values: the validated values, if they contain unions with the discriminator `name`: pydantic's path of a field
            then also has the name, as in `engine.vllm.block_size`. The name is left out.
    """
    where = prefix + ".".join(_path(error["loc"], values or {})) or "the value"
    reason = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error":
        return reason
    if error["type"] == "missing":
        return f"{where} is missing"
    if error["type"] == "union_tag_not_found":
        return f"{where}.name is missing; it decides which other keys of {where} there are"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where} is an unknown key"
    if error["type"] == "union_tag_invalid":
        return f"{where}.name is {error['ctx']['tag']!r}; use {error['ctx']['expected_tags']}"
    value = repr(error["input"])
    shown = value if len(value) <= MAX_INPUT_CHARS else value[:MAX_INPUT_CHARS] + "..."
    limits = [f"{sign} {error['ctx'][key]:g}" for key, sign in _SIGNS.items() if key in error.get("ctx", {})]
    return f"{where} is {shown}; must be {limits[0]}" if limits else f"{where} is {shown}: {reason}"


def _path(loc: tuple[int | str, ...], values: Any) -> list[str]:
    """Keys of a field in `values`: ("engine", "vllm", "block_size") becomes engine, block_size."""
    path = list[str]()
    for part in loc:
        within = cast(Mapping[Any, Any], values) if isinstance(values, Mapping) else {}
        if part not in within and within.get("name") == part:
            continue
        path.append(str(part))
        values = within.get(part)
    return path
