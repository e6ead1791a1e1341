"""The weights of earlier versions on one rank, as lossless changes from each version to the one before.

    newest     copy of the weights in memory of the host
    changes    of each older version from the next newer one: the coder of `sync.delta`, which stores a tensor whole if
               that is smaller

A walk goes from the newest to the oldest version and puts the values of each into the model. At its end the model has
the bits of the newest version again. Versions are numbered by their optimizer updates.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from async_rl.weights.delta import decode, encode
from async_rl.weights.plan import BUCKET_BYTES

Version = tuple[int, Sequence[bytes]]
"""Optimizer updates of an older version, and its buckets of tensors as changes of those of the next newer one."""


class VersionStore:
    """The versions of the last optimizer updates on this rank.

    Args:
        tensors: name -> tensor of the model that training changes.
        keep: optimizer updates after which a version is dropped.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, keep: int) -> None:
        self._live = tensors
        self._keep = keep
        self._buckets = list(_buckets(tensors))
        self._newest: dict[str, Tensor] = {}
        self._now = -1
        self._older: list[Version] = []  # newest first
        self._unknown: set[int] = set()

    def __contains__(self, update: int) -> bool:
        return update in self.updates

    @property
    def updates(self) -> list[int]:
        """Optimizer updates of the versions, newest first; empty before the first `add`."""
        every = [] if not self._newest else [self._now, *(update for update, _ in self._older)]
        return [update for update in every if update not in self._unknown]

    @property
    def share(self) -> float:
        """Bytes of an older version over those of the model, mean over the versions; 0 without any."""
        size = sum(tensor.nbytes for tensor in self._live.values())
        stored = sum(len(changes) for _, buckets in self._older for changes in buckets)
        return stored / max(1, size * len(self._older))

    def add(self, update: int) -> None:
        """Store the weights of the model as the version of `update` optimizer updates, unless it is the newest one."""
        if self._newest and update == self._now:
            return
        newest = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._live.items()}
        if self._newest:
            before = self._newest
            changes = [
                encode([(name, before[name]) for name in names], base=newest, base_digest=str(update))
                for names in self._buckets
            ]
            self._older.insert(0, (self._now, changes))
        self._newest, self._now = newest, update
        self._older = [version for version in self._older if update - self._keep <= version[0] < update]
        self._unknown = {each for each in self._unknown if each >= update - self._keep}

    @contextmanager
    def walk(self) -> Generator[_Walk]:
        """Inside the block `load` of the result sets the weights; at the end they are those of before, bit by bit."""
        walk = _Walk(self._live, dict(self._newest), self._now, list(self._older))
        try:
            yield walk
        finally:
            if walk.moved:
                walk.load(self._now, self._newest)

    def forget(self, updates: Iterable[int]) -> None:
        """Leave these versions out of `updates`, also if they are added later."""
        self._unknown |= {*updates}

    # ---- checkpoints

    def state(self) -> tuple[list[Version], set[int]]:
        """The older versions, newest first, and those that were forgotten: arguments of `restore`."""
        return list(self._older), self._unknown

    def restore(self, update: int, older: Iterable[Version] = (), forgotten: Iterable[int] = ()) -> None:
        """Take the weights of the model as the newest version, and `state` as the older ones."""
        self._newest, self._older = {}, []
        self.add(update)
        self._older, self._unknown = list(older), {*forgotten}


class _Walk:
    """A place among the versions of a store."""

    def __init__(
        self, live: Mapping[str, Tensor], tensors: dict[str, Tensor], update: int, older: list[Version]
    ) -> None:
        self._live, self._tensors, self._update, self._older = live, tensors, update, older
        self.moved = False

    def tensors(self, update: int) -> Mapping[str, Tensor]:
        """The values of a version, on the host: of the same one as before, or of an older one."""
        while self._update > update:
            older, buckets = self._older.pop(0)
            for changes in buckets:
                self._tensors |= decode(changes, base=self._tensors, base_digest=str(self._update))
            self._update = older
        return self._tensors

    @torch.no_grad()
    def load(self, update: int, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Set the weights of the model to those of a version, or to other values."""
        if tensors is None and update == self._update and not self.moved:
            return
        for name, value in (tensors or self.tensors(update)).items():
            self._live[name].copy_(value)
        self.moved = True


def _buckets(tensors: Mapping[str, Tensor]) -> Iterable[list[str]]:
    """Names of the tensors in buckets of about `BUCKET_BYTES`."""
    names, size = list[str](), 0
    for name, tensor in tensors.items():
        names.append(name)
        size += tensor.nbytes
        if size >= BUCKET_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names
