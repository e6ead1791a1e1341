"""Makes torchvision importable in SGLang's processes on a CPU. Python runs this module at its start.

Importing torchvision registers fake kernels for two operators of its compiled library. It does not load here, so this
module declares the operators when torchvision is imported. They are never called.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _DeclaresOperators(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is first imported; finds no modules itself."""

    library: Any = None
    """Owns the declarations, and they end with it; None until torchvision is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and type(self).library is None:
            import torch

            type(self).library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                type(self).library.define(schema)
        return None


sys.meta_path.insert(0, _DeclaresOperators())
