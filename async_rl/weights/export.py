"""Writes the trainer's current weights as a version that engines can load. Collective over all trainer ranks."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from async_rl.train.convert import export_weights
from async_rl.train.gpt import BuiltModel
from async_rl.weights.transport import WeightUpdate, discard_updates, write_update


def export_update(model: BuiltModel, directory: Path, *, version: int, keep_version: int) -> WeightUpdate | None:
    """The written version on rank 0, None on the others. Versions before `keep_version` are removed first.

    Raises:
        OSError: no room or no permission in `directory`.
    """
    tensors = export_weights(model.chunks, shape=model.shape)
    if dist.get_rank() == 0:
        discard_updates(directory, keep_version=keep_version)
        return write_update(directory, version=version, tensors=tensors)
    for _ in tensors:  # take part in the gathers
        pass
    return None
