"""A second set of weights for an engine's model, loaded while the first one serves and then exchanged with it.

    model   decodes with version 7                   | exchange |   decodes with version 8
    twin    loads version 8, in a separate thread    |          |   is free for version 9

An exchange takes time in proportion to the number of tensors, not to their size: both sides swap their memory. On a GPU
the tensors of the twin are copied instead, because a CUDA graph keeps the addresses of the model's tensors.

SGLang's server loads this file by its path, so the file must not import from async_rl.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import MethodType
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
_TENSORS = ("_parameters", "_buffers")  # attributes of a module


class Twin:
    """A copy of a model for loading alone: its own tensors, and everything else shared.

    Args:
        model: model of an engine, completely loaded.

    Attributes:
        model: the copy. It has the modules and tensors of the original under the same names; it is never called.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._copies: dict[int, Any] = {id(module): _bare(module) for module in model.modules()}
        self._pairs: list[tuple[Any, Any]] = [(module, self._copies[id(module)]) for module in model.modules()]
        self._tensors: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        for module, bare in list(self._pairs):
            self._fill(module, bare)
        self.model: torch.nn.Module = self._copies[id(model)]
        self._before = [dict(twin.__dict__) for _, twin in self._pairs]
        self._loaded: list[set[str]] = [set() for _ in self._pairs]  # attributes that a load replaces

    @property
    def modules(self) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
        """Each module of the model, and its copy."""
        return ((live, twin) for live, twin in self._pairs if isinstance(live, torch.nn.Module))

    @torch.no_grad()
    def exchange(self) -> None:
        """Give the loaded weights to the model, and the weights of the model to the twin.

        No forward pass may run. Beside parameters and buffers the sides exchange each attribute that a load of the twin
        has replaced, for example a weight in the packed form of a kernel.
        """
        exchanged: set[int] = set()
        for (live, twin), before, loaded in zip(self._pairs, self._before, self._loaded, strict=True):
            if isinstance(live, torch.nn.Module):
                for kind in _TENSORS:
                    _exchange_tensors(getattr(live, kind), getattr(twin, kind), exchanged)
            loaded |= {
                name for name in before.keys() | twin.__dict__ if before.get(name) is not twin.__dict__.get(name)
            }
            for name in loaded:
                _exchange_item(live.__dict__, twin.__dict__, name)

    def _fill(self, module: torch.nn.Module, bare: torch.nn.Module) -> None:
        """Give a bare copy its tensors and children, and copies of the objects that refer to modules."""
        children: dict[str, torch.nn.Module | None] = module.__dict__["_modules"]
        bare.__dict__["_modules"] = {
            name: None if child is None else self._copies[id(child)] for name, child in children.items()
        }
        for kind in _TENSORS:
            tensors: dict[str, Any] = getattr(module, kind)
            bare.__dict__[kind] = {n: None if t is None else self._tensor(t) for n, t in tensors.items()}
        bare.__dict__["_non_persistent_buffers_set"] = set(module.__dict__["_non_persistent_buffers_set"])
        for name, value in module.__dict__.items():
            if id(value) in self._copies:
                bare.__dict__[name] = self._copies[id(value)]
            elif any(id(part) in self._copies for part in getattr(value, "__dict__", {}).values()):
                bare.__dict__[name] = self._helper(value)

    def _helper(self, helper: Any) -> Any:
        """Copy of an object that refers to modules, such as the implementation of an attention layer."""
        other = copy.copy(helper)
        for name, value in vars(helper).items():
            other.__dict__[name] = self._copies.get(id(value), value)
        self._copies[id(helper)] = other
        self._pairs.append((helper, other))
        return other

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy of a tensor with its class and attributes; tensors that share memory have copies that share memory."""
        if id(tensor) not in self._tensors:
            storage = tensor.untyped_storage()
            at = storage.data_ptr() or id(tensor)
            if at not in self._storages:
                self._storages[at] = storage.clone()
            other: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            other.set_(self._storages[at], tensor.storage_offset(), tensor.size(), tensor.stride())
            other.__class__ = type(tensor)
            other.__dict__ = {name: self._rebound(value) for name, value in tensor.__dict__.items()}
            self._tensors[id(tensor)] = other
        return self._tensors[id(tensor)]

    def _rebound(self, value: Any) -> Any:
        """A method of a module, such as a weight loader, as method of its copy."""
        if isinstance(value, MethodType) and id(value.__self__) in self._copies:
            return MethodType(value.__func__, self._copies[id(value.__self__)])
        return value


class Staging(Generic[T]):
    """Loads versions into the twin of a model, in a thread; `commit` exchanges it with the model."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._twin: Twin | None = None
        self._load: Future[T] | None = None

    def start(self, model: torch.nn.Module, load: Callable[[Twin], T]) -> None:
        """Start `load`, after a load that is under way; the twin is made at the first call and after a failed load."""

        def run() -> T:
            twin, self._twin = self._twin or Twin(model), None
            with torch.no_grad():
                result = load(twin)
            self._twin = twin
            return result

        self._load = self._thread.submit(run)

    def result(self) -> T | None:
        """Result of the load; None until it has ended.

        Raises:
            Exception: the load's own error.
        """
        return None if self._load is None or not self._load.done() else self._load.result()

    def commit(self) -> None:
        """Exchange the weights.

        Raises:
            RuntimeError: no load has ended since the last call.
        """
        if self._load is None or self._twin is None:
            raise RuntimeError("no staged version is complete")
        self._twin.exchange()
        self._load = None


def _bare(module: torch.nn.Module) -> torch.nn.Module:
    """A module with the attributes of `module`."""
    bare: torch.nn.Module = type(module).__new__(type(module))
    bare.__dict__.update(module.__dict__)
    return bare


def _exchange_tensors(
    live: dict[str, torch.Tensor | None], twin: dict[str, torch.Tensor | None], exchanged: set[int]
) -> None:
    """Exchange the memory of the tensors of a module that are not in `exchanged`; add them to `exchanged`."""
    for name in live.keys() | twin.keys():
        ours, theirs = live.get(name), twin.get(name)
        if ours is None or theirs is None:
            _exchange_item(live, twin, name)
        elif id(ours) not in exchanged:
            exchanged.add(id(ours))
            if ours.is_cuda:
                ours.copy_(theirs)
            else:
                ours.data, theirs.data = theirs.data, ours.data


def _exchange_item(one: dict[str, Any], other: dict[str, Any], name: str) -> None:
    """Exchange an item that both, one or none of the dictionaries have."""
    missing = object()
    mine, theirs = one.pop(name, missing), other.pop(name, missing)
    if theirs is not missing:
        one[name] = theirs
    if mine is not missing:
        other[name] = mine
