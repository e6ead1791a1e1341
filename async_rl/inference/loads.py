"""Reports of the ranks of an engine on a load, and their comparison with the published version.

Each rank loads all buckets and hashes its share (`async_rl.weights.digest.load_share`). The digests cover the tensors
that the loader of the rank took, and each rank reports the names of all that its loader took:

    rank 0   digests of buckets 0, 2   names a1b2
    rank 1   digest of bucket 1        names a1b2

If the digests are the published ones, each tensor was taken by the rank that hashed it; if the names are equal too, by
every rank. So a damaged bucket, a bucket that no rank has hashed, and a loader that skips a tensor are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.weights.live import LiveWeights, Published, Rank
from async_rl.weights.transport import WeightUpdate, bucket_file


@dataclass(frozen=True, slots=True)
class RankLoad:
    """A rank's report of a load."""

    buckets: Mapping[int, str]
    """Number of each bucket that the rank hashed -> digest of the tensors that its loader took from it."""
    names: str
    """Digest of the names of all tensors that its loader took."""
    published: Published
    """Sums of the published tensors that the rank hashed; see `async_rl.weights.live`."""
    parameters: Rank
    """Name -> checksum and sums of each parameter after the load."""

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> RankLoad:
        """A report as it comes from the process of the rank, with pairs for `buckets`."""
        return cls(dict(report["buckets"]), report["names"], report["published"], report["parameters"])


def first_weights(ranks: Sequence[Mapping[str, Any]]) -> LiveWeights:
    """Content of an engine's model after its start. ranks: fields `published` and `parameters` of each rank."""
    return LiveWeights(
        published={name: sums for rank in ranks for name, sums in rank["published"].items()},
        ranks=[rank["parameters"] for rank in ranks],
    )


def published_by(ranks: Sequence[RankLoad]) -> Published:
    """Sums of the tensors that all ranks hashed together."""
    return {name: sums for rank in ranks for name, sums in rank.published.items()}


def difference(update: WeightUpdate, ranks: Sequence[RankLoad]) -> str | None:
    """The first difference between the tensors that the ranks loaded and the published ones; None if there is none."""
    found = {number: (rank, load.buckets[number]) for rank, load in enumerate(ranks) for number in load.buckets}
    for number in sorted(found.keys() | set(range(len(update.buckets)))):
        bucket = f"bucket {number} ({bucket_file(update.path, number)})"
        if number not in found:
            return f"no rank of the engine has hashed {bucket}, which was published with {update.buckets[number]}"
        rank, digest = found[number]
        published = update.buckets[number] if number < len(update.buckets) else "none"
        if digest != published:
            return f"rank {rank} loaded {bucket} with digest {digest}, but {published} was published"
    if others := [rank for rank, load in enumerate(ranks) if load.names != ranks[0].names]:
        return f"the loader of rank {others[0]} took other tensors from {update.path} than that of rank 0"
    return None
