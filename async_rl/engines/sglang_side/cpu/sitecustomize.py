"""Run by Python at its start in SGLang's processes on a CPU, where torchvision's compiled part does not load.

Importing torchvision registers fake kernels for two operators that the compiled part declares. They are declared here
instead, when torchvision is about to be imported; nothing calls them.
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
    """Finds nothing; declares the operators when torchvision is looked for, once."""

    library: Any = None  # its declarations live as long as it does

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
