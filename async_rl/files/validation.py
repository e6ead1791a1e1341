"""Text of pydantic's errors: field, value and reason."""

from __future__ import annotations

from typing import Any

MAX_INPUT_CHARS = 200


def explain(error: Any, *, prefix: str = "") -> str:
    """One entry of `ValidationError.errors()` as `field is value: reason`. prefix: written before the field's path."""
    where = prefix + ".".join(str(part) for part in error["loc"]) or "the value"
    reason = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error":
        return reason
    if error["type"] == "missing":
        return f"{where} is missing"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where} is an unknown key"
    value = repr(error["input"])
    shown = value if len(value) <= MAX_INPUT_CHARS else value[:MAX_INPUT_CHARS] + "..."
    return f"{where} is {shown}: {reason}"
