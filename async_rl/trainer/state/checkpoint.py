"""Trainer checkpoints: one folder for all ranks, written atomically and independent of the parallel layout.

    trainer.json      Manifest, and a hash of every other file
    __R_0.distcp      parts of tensors that rank R wrote; with .metadata, common.pt and metadata.json a checkpoint of
                      megatron.core.dist_checkpointing (torch_dist)

Tensors are stored under the names of megatron's modules, with global layer and expert numbers. Their global shapes are
the same in every layout except for the padding of the vocabulary. With LoRA, only the adapters are stored.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from async_rl.files.atomic_dir import partial_folder, publish_folder, recover_folder
from async_rl.trainer.distributed import ProcessGroups
from async_rl.trainer.model.families import ModelShape
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.state.shards import CopiedShards, copy_shards, read_shards, stored_files, write_shards
from async_rl.weights.pretrained import sampled_digest
from message_queue.errors import AsyncRLError

Value = TypeVar("Value")
FORMAT = 3
_MANIFEST = "trainer.json"


class TrainerCheckpointError(AsyncRLError, ValueError):
    """A checkpoint cannot be restored; the message names the folder and a fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a checkpoint."""

    model: dict[str, Any]
    """Result of `fields_of`; the restoring trainer must have the same."""
    layout: dict[str, int]
    """Name of a parallel group -> its size when the checkpoint was written."""
    updates: int
    """Optimizer updates so far, as the learning rate schedule counts them."""
    steps: int
    """Optimizer updates so far, as Adam counts them: without updates that had no gradient."""
    reference: bool
    """Whether the checkpoint contains the reference weights of a KL term."""
    start: str | None = None
    """Folder of the start checkpoint, whose weights LoRA adapters belong to; None without LoRA."""


def copy_state(directory: Path, state: dict[str, Any], *, ranks: ProcessGroups) -> CopiedShards:
    """Copy nested shards for `write_state`, and begin checkpoint `directory`. Collective.

    Raises:
        OSError: the disk has no free space or is not writable.
    """
    unfinished = partial_folder(directory)

    def prepare() -> None:
        recover_folder(directory)
        unfinished.mkdir(parents=True)

    _on_first_rank(prepare, ranks.gather)
    return copy_shards(unfinished, state)


def write_state(directory: Path, shards: CopiedShards, *, manifest: Manifest, ranks: ProcessGroups) -> None:
    """Write checkpoint `directory`. It appears when all files are on disk. Collective in `ranks.saving`.

    Raises:
        OSError: the disk has no free space or is not writable; raised on all ranks. An existing checkpoint is
            unchanged.
    """
    gather = partial(ranks.gather, group=ranks.saving)
    unfinished = partial_folder(directory)

    def finish() -> None:
        (unfinished / _MANIFEST).write_bytes(document)
        publish_folder(directory)

    try:
        try:
            write_shards(unfinished, shards, group=ranks.saving)
        except CheckpointException as error:
            raise _os_error(error, unfinished) from error
        mine = [path for path in unfinished.iterdir() if _writer(path) == ranks.rank]
        files = {name: value for part in gather(_hashes(mine)) for name, value in part.items()}
        if gone := sorted(_on_first_rank(lambda: stored_files(unfinished), gather) - files.keys()):
            raise FileNotFoundError(errno.ENOENT, f"{', '.join(gone)} vanished while they were saved", str(unfinished))
        document = msgspec.json.encode({"format": FORMAT, "manifest": manifest, "files": files})
        _on_first_rank(finish, gather)
    except OSError:
        _on_first_rank(lambda: recover_folder(directory), gather)  # free the space of the unfinished folder
        raise


def read_manifest(directory: Path, *, model: Mapping[str, Any], ranks: ProcessGroups) -> Manifest:
    """Check all files of checkpoint `directory` and return its manifest. Collective.

    Args:
        directory: the checkpoint.
        model: required value of `Manifest.model`.
        ranks: each checks a part of the files.

    Raises:
        TrainerCheckpointError: the folder does not exist, is damaged, or has another format or model; the same error
            on all ranks.
    """
    manifest, hashes = _on_first_rank(lambda: _read_manifest(directory), ranks.gather)
    mine = [directory / name for name in sorted(hashes)[ranks.rank :: ranks.size]]
    wrong = [problem for part in ranks.gather(_problems(mine, hashes)) for problem in part]
    if wrong:
        raise TrainerCheckpointError(f"{directory} is damaged: {'; '.join(wrong)}; restore from an older checkpoint")
    found = manifest.model
    differing = [
        f"{name} is {found.get(name)!r} there and {model.get(name)!r} here"
        for name in sorted({*found, *model})
        if found.get(name) != model.get(name)
    ]
    if differing:
        raise TrainerCheckpointError(
            f"{directory} is of another model: {'; '.join(differing)}; give one of this model and these settings"
        )
    return manifest


def require_complete(directory: Path) -> None:
    """Check that all files of checkpoint `directory` exist; their content is checked when it is restored.

    Raises:
        TrainerCheckpointError: the folder, its manifest or a file is missing.
    """
    _, hashes = _read_manifest(directory)
    missing = sorted(name for name in hashes if not (directory / name).is_file())
    if missing:
        raise TrainerCheckpointError(
            f"{directory} lacks {', '.join(missing)}, which ranks wrote on another machine; use a shared disk"
        )


def start_of(directory: Path) -> Path | None:
    """Folder of the start checkpoint of a checkpoint of LoRA adapters; None for one of all weights.

    Raises:
        TrainerCheckpointError: the folder or its manifest is missing or damaged.
    """
    manifest, _ = _read_manifest(directory)
    return None if manifest.start is None else Path(manifest.start)


def load_state(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Read the tensors of the shards in `state`, in the same nesting. Collective; call `read_manifest` first.

    Raises:
        TrainerCheckpointError: a tensor is missing or has another shape. The trainer must not be used any more, because
            some tensors may have been loaded.
    """
    try:
        return read_shards(directory, state)
    except Exception as error:
        raise TrainerCheckpointError(
            f"{directory} does not fit this trainer: {error}; give a checkpoint of the same model"
        ) from error


def fields_of(shape: ModelShape, *, config: TrainerConfig, start: Path) -> dict[str, Any]:
    """`Manifest.model` of a model; equal to its JSON round trip.

    Args:
        shape: properties of the model.
        config: settings of the trainer.
        start: folder of the start checkpoint, whose weights count only with LoRA.
    """
    fields = {**shape.megatron, "vocab_size": shape.vocab_size, "tied": shape.tied, "dtype": config.dtype}
    if config.lora.rank:
        fields |= {f"trainer.lora.{name}": value for name, value in asdict(config.lora).items()}
        fields["weights of the start checkpoint"] = sampled_digest(start)
    return msgspec.json.decode(msgspec.json.encode(fields, enc_hook=str))


def _on_first_rank(work: Callable[[], Value], gather: Callable[[object], list[Any]]) -> Value:
    """Run `work` on rank 0; all ranks return its result or raise its error. Collective, as `gather`."""
    outcome: tuple[Value | None, Exception | None] = None, None
    if dist.get_rank() == 0:
        try:
            outcome = work(), None
        except (OSError, TrainerCheckpointError) as error:
            outcome = None, error
    value, failure = gather(outcome)[0]
    if failure is not None:
        raise failure
    return value


def _writer(path: Path) -> int:
    """The rank that wrote a file: 3 for `__3_0.distcp`, 0 for files without a rank in their name."""
    return int(path.name.split("_")[2]) if path.name.startswith("__") else 0


def _read_manifest(directory: Path) -> tuple[Manifest, dict[str, str]]:
    """The manifest, and name of every other file -> hash of its content."""
    recover_folder(directory)
    path = directory / _MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TrainerCheckpointError(
            f"{directory} has no readable {_MANIFEST} ({error.strerror}); give the folder of a trainer checkpoint"
        ) from error
    try:
        document = msgspec.json.decode(data, type=dict[str, Any])
        if (found := document.get("format")) == FORMAT:
            return msgspec.convert(
                (document.get("manifest"), document.get("files")), tuple[Manifest, dict[str, str]], str_keys=True
            )
    except msgspec.DecodeError as error:
        raise TrainerCheckpointError(f"{path} is damaged: {error}; restore from an older checkpoint") from error
    raise TrainerCheckpointError(f"{path} has format {found}; this version reads format {FORMAT}")


def _hashes(paths: Sequence[Path]) -> dict[str, str]:
    return {path.name: _hash(path) for path in paths}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _problems(paths: Sequence[Path], expected: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    for path in paths:
        try:
            if _hash(path) != expected[path.name]:
                found.append(f"{path.name} has changed since it was written")
        except OSError as error:
            found.append(f"{path.name} cannot be read ({error.strerror})")
    return found


def _os_error(error: CheckpointException, partial: Path) -> OSError:
    """The first error that torch gathered from the ranks, as an OSError."""
    cause = next(iter(error.failures.values()))[0]
    number = cause.errno if isinstance(cause, OSError) and cause.errno else errno.EIO
    return OSError(number, f"a rank could not write its part of the checkpoint: {cause}", str(partial))
