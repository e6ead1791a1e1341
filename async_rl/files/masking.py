"""Secrets stay out of what a run shows or stores: a value that gives access becomes `<secret>`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

MASK = "<secret>"
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])|[-. ]")  # where a name gets an underscore: apiKey, api-key
_SECRET = re.compile(
    r"passw|passphrase|secret|credential|authorization|bearer|cookie|(^|_)(pass|pwd|pat|auth|dsn)$|(^|_)env$"
    r"|(^|_)(api|access|auth|private|run|account|license|signing|encryption|shared|master)_?keys?$"
    r"|(^|_)(api|access|auth|refresh|hf|github)_?tokens?$|^(key|token)$"
)
_PERHAPS = re.compile(r"(key|token)s?$")  # unless the value is a word or a special token, as in answer_key=solution
_HARMLESS = re.compile(r"<.*>|\[.*\]|[a-z]+([_.][a-z]+)*", re.IGNORECASE)
_IN_TEXT = re.compile(
    r"(?P<kept>://)[^\s'\"]*:[^\s'\"]*(?=@)|(?P<http>https?://)[^\s'\"/]+(?=@)"
    r"|(?<![\w-])(sk-|hf_|gh[po]_|github_pat_|glpat-|xox[abpr]-|AKIA|AIza|eyJ)[\w.-]{12,}"
    r"|(?P<name>(^|(?<=[?&;'\"])|--)[\w.+-]*(?i:passw\w*|secret\w*|key|token|sig|signature)=)[^\s&;'\"]+"
)


def mask_text(text: str) -> str:
    """Text without passwords in URLs, keys of well-known services, and values that follow `api_key=` and the like."""
    return _IN_TEXT.sub(lambda found: f"{found['kept'] or found['http'] or found['name'] or ''}{MASK}", text)


def masked(value: Any, name: str = "", *, secret: bool = False) -> Any:
    """Plain values of a config without secrets. Interpolations stay, and values that are not set.

    Args:
        value: a mapping, a list, or one value.
        name: field, option or variable of the value.
        secret: whether all values inside are secrets, as in a mapping of environment variables.
    """
    word = _WORDS.sub("_", name).lower()
    secret = secret or bool(_SECRET.search(word))
    if isinstance(value, Mapping):
        return {key: masked(each, str(key), secret=secret) for key, each in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [masked(each, name, secret=secret) for each in cast(Sequence[Any], value)]
    if value is None or isinstance(value, bool) or re.fullmatch(r"(\$\{[^{}]*\})?", f"{value}"):
        return value
    if secret or (isinstance(value, str) and _PERHAPS.search(word) and not _HARMLESS.fullmatch(value)):
        return MASK
    return mask_text(value) if isinstance(value, str) else value


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs (dotted key, value): {"a": {"b": 1}} -> ("a.b", 1). Empty mappings are values."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(cast(Mapping[str, Any], value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """`field: old -> new` of the dotted fields that differ, in JSON; "-" is a field that is missing.

    `resume` is left out, which says how to start and not what to run. An empty mapping has no fields.
    """
    both = [{key: value for key, value in dotted(values) if value != {}} for values in (old, new)]
    for key in dict.fromkeys(key for values in both for key in values):
        before, after = (
            json.dumps(values[key], ensure_ascii=False, default=str) if key in values else "-" for values in both
        )
        if before != after and key != "resume":
            yield f"{key}: {before} -> {after}"


def hidden(value: Any, name: str = "") -> Iterator[str]:
    """Dotted names of the values that `masked` has changed."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, each in cast(Any, items):
        yield from hidden(each, f"{name}.{key}".lstrip("."))
    if isinstance(value, str) and MASK in value:
        yield name
