"""Import-only stand-in for SGLang's kernel library, which has no CPU build.

SGLang imports names from it that it calls only on a GPU or with AMX; here every name is a function that raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """A function for any kernel that is asked for."""
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU version; SGLang should take its torch path here")

    return absent
