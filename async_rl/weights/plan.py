"""The bucket of each tensor of the model, and the trainer rank that sends it. Pure, and equal on all ranks.

The tensors of one owner are packed in the order of the layers:

    owner 0   embedding, attention of layer 0, 1, ...     buckets 0, 2, ...
    owner 1   experts of layer 0, 1, ...                  buckets 1, 3, ...
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

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


Unit: TypeAlias = tuple[TensorSpec, ...]
"""Tensors that leave their owner together, for example query, key and value of a layer; at least one."""


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
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Tensors of all units."""
        return tuple(chain.from_iterable(self.units))


def plan_buckets(owned: Mapping[int, Sequence[Unit]], *, bucket_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """The buckets of a model, ordered by the layer of their first tensor; each tensor is in one bucket.

    Args:
        owned: trainer rank -> its units, in any order.
        bucket_bytes: bound on a bucket; a larger unit has a separate bucket.

    Raises:
        ValueError: a tensor has two owners.
    """
    packed = [
        (units, owner)
        for owner, mine in owned.items()
        for units in _packed(sorted(mine, key=lambda unit: unit[0].place), bucket_bytes)
    ]
    packed.sort(key=lambda bucket: (bucket[0][0][0].place, bucket[1]))
    buckets = tuple(Bucket(number, owner, tuple(units)) for number, (units, owner) in enumerate(packed))
    for name, count in Counter(tensor.name for bucket in buckets for tensor in bucket.tensors).items():
        if count > 1:
            raise ValueError(f"two ranks own {name}")
    return buckets


def _packed(units: Sequence[Unit], bucket_bytes: int) -> Iterator[list[Unit]]:
    """Consecutive units, together at most `bucket_bytes` or one unit."""
    held: list[Unit] = []
    num_bytes = 0
    for unit in units:
        more = sum(tensor.num_bytes for tensor in unit)
        if held and num_bytes + more > bucket_bytes:
            yield held
            held, num_bytes = [], 0
        held.append(unit)
        num_bytes += more
    if held:
        yield held
