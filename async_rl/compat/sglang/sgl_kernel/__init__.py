"""Stand-in for SGLang's kernel library, because this has no CPU build. It can only be imported.

SGLang imports kernels that it calls only on a GPU or with AMX. Here every name is a function that raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """A function that raises NotImplementedError, for any kernel name."""
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU version; SGLang should take its torch path here")

    return absent
