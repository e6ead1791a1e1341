"""Transport of a published version from trainer to engines: a safetensors file in shared memory or on a shared disk.

The trainer writes the file once. Every engine maps it, loads the tensors and returns their digest.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from async_rl.weights.digest import ModuleDigest, WeightsDigest
from message_queue.tokens import WeightVersion

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A published version."""

    path: Path
    """Safetensors file with Hugging Face names."""
    weights: WeightVersion
    """Version number and digest of the tensors."""
    modules: Mapping[str, ModuleDigest] = field(default_factory=dict[str, ModuleDigest])
    """Module -> digest. If empty, engines skip the check of `async_rl.weights.live`."""


def write_update(directory: Path, *, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate:
    """Write one version atomically as `directory`/weights-`version`.safetensors.

    Args:
        directory: created if it does not exist.
        version: `param_version`.
        tensors: (Hugging Face name, tensor on any device); all are in memory until the file is written.

    Raises:
        OSError: `directory` has no free space or is not writable; the message names the path.
    """
    from safetensors.torch import save_file  # imports torch, which a configuration does without

    directory.mkdir(parents=True, exist_ok=True)
    digest = WeightsDigest()
    written: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        written[name] = tensor.detach().to("cpu").contiguous()
        digest.update(name, written[name])
    path = directory / f"weights-{version}.safetensors"
    partial = path.with_suffix(".partial")
    save_file(written, partial)
    partial.replace(path)
    return WeightUpdate(path=path, weights=WeightVersion(version, digest.hexdigest()), modules=digest.modules())


def read_update(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, CPU tensor) of a written version."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            yield name, file.get_tensor(name)


def discard_updates(directory: Path, *, keep_version: int) -> None:
    """Remove every version older than `keep_version`."""
    for path in directory.glob("weights-*.safetensors"):
        if int(path.stem.split("-")[1]) < keep_version:
            path.unlink()


def remove_directory(directory: Path) -> None:
    """Remove the directory of `write_update` with all versions."""
    shutil.rmtree(directory, ignore_errors=True)
