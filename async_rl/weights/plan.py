"""The bucket of each tensor of the model, and the trainer rank that sends it. Pure, and equal on all ranks.

The tensors of one owner are packed in the order of the layers:

    owner 0   embedding, attention of layer 0, 1, ...     buckets 0, 2, ...
    owner 1   experts of layer 0, 1, ...                  buckets 1, 3, ...
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}  # of others: 1
BUCKET_BYTES = 512 << 20
"""Default bound on the tensors of a bucket."""


class TensorSpec(NamedTuple):
    """A tensor of the model as engines know it."""

    name: str
    """Hugging Face name."""
    dtype: str
    """Name of the dtype, for example `bfloat16`."""
    shape: tuple[int, ...]
    """Shape of the complete tensor."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 1)

    @property
    def place(self) -> tuple[float, str]:
        """Sort key: the embedding is first, then the layers follow, and the rest is last."""
        layer = _LAYER.match(self.name)
        if layer is not None:
            return int(layer[1]), self.name
        return (-1 if "embed" in self.name else math.inf), self.name


class Unit(NamedTuple):
    """Tensors that leave their owner together, for example query, key and value of a layer."""

    tensors: tuple[TensorSpec, ...]
    """At least one."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together."""

    number: int
    """Position in the plan."""
    owner: int
    """Trainer rank that has the complete tensors."""
    units: tuple[Unit, ...]
    """In the order of the layers."""

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Tensors of all units."""
        return (tensor for unit in self.units for tensor in unit.tensors)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The buckets of a model, ordered by the layer of their first tensor."""

    buckets: tuple[Bucket, ...]
    """All buckets; each tensor is in one bucket."""

    @classmethod
    def of(cls, owned: Mapping[int, Sequence[Unit]], *, bucket_bytes: int = BUCKET_BYTES) -> SyncPlan:
        """Plan for the units that each rank owns, in any order.

        Args:
            owned: trainer rank -> its units.
            bucket_bytes: bound on a bucket; a larger unit has a separate bucket.

        Raises:
            ValueError: a tensor has two owners.
        """
        packed = [
            (units, owner)
            for owner, mine in owned.items()
            for units in _packed(sorted(mine, key=lambda unit: unit.tensors[0].place), bucket_bytes)
        ]
        packed.sort(key=lambda bucket: (bucket[0][0].tensors[0].place, bucket[1]))
        plan = cls(tuple(Bucket(number, owner, tuple(units)) for number, (units, owner) in enumerate(packed)))
        names: set[str] = set()
        for tensor in plan.tensors:
            if tensor.name in names:
                raise ValueError(f"two ranks own {tensor.name}")
            names.add(tensor.name)
        return plan

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Tensors of all buckets."""
        return (tensor for bucket in self.buckets for tensor in bucket.tensors)


def _packed(units: Sequence[Unit], bucket_bytes: int) -> Iterator[list[Unit]]:
    """Consecutive units, together at most `bucket_bytes` or one unit."""
    held: list[Unit] = []
    num_bytes = 0
    for unit in units:
        more = sum(tensor.num_bytes for tensor in unit.tensors)
        if held and num_bytes + more > bucket_bytes:
            yield held
            held, num_bytes = [], 0
        held.append(unit)
        num_bytes += more
    if held:
        yield held
