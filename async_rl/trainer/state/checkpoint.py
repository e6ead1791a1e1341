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
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from async_rl.files.atomic_dir import partial_folder, publish_folder, recover_folder
from async_rl.trainer.distributed import ProcessGroups
from async_rl.trainer.model.families import ModelShape
from async_rl.trainer.model.model import TrainerConfig
from async_rl.weights.pretrained import sampled_digest
from message_queue.errors import AsyncRLError

Value = TypeVar("Value")
CopiedShards = dict[str, Any]
"""Name of a tensor or value -> the part that this rank writes, in torch's types, in memory of the CPU."""
FORMAT = 3
_MANIFEST = "trainer.json"


class TrainerCheckpointError(AsyncRLError, ValueError):
    """A checkpoint cannot be restored; the message names the folder and a fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticState:
    """Description of the critic in a checkpoint."""

    model: dict[str, Any]
    """Kind of trunk, and `fields_of` an own one; the restoring critic must have the same."""
    updates: int
    """As `Manifest.updates`, of the critic."""
    steps: int
    """As `Manifest.steps`, of the critic."""


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
    versions: bool = False
    """Whether the checkpoint contains the stored versions of each rank."""
    start: str | None = None
    """Folder of the start checkpoint, whose weights LoRA adapters belong to; None without LoRA."""
    critic: CriticState | None = None
    """The critic; None if the checkpoint has none."""


def copy_state(directory: Path, state: dict[str, Any], *, ranks: ProcessGroups) -> CopiedShards:
    """Copy nested shards for `write_state`, and begin checkpoint `directory`. Collective.

    Of replicated parts one rank has a copy. `state` must not be used afterwards.

    Raises:
        OSError: the disk has no free space or is not writable.
    """
    unfinished = partial_folder(directory)

    def prepare() -> None:
        recover_folder(directory)
        unfinished.mkdir(parents=True)

    _on_first_rank(prepare, ranks.gather)
    copies = _Copies("torch_dist", 1)
    dist_checkpointing.save(state, str(unfinished), sharded_strategy=copies)
    return copies.shards


def write_state(directory: Path, shards: CopiedShards, *, manifest: Manifest, ranks: ProcessGroups) -> None:
    """Write checkpoint `directory`. It appears when all files are on disk. Collective in `ranks.saving`.

    Megatron's own strategies fork a process per file. This is unsafe in a rank with gloo, NCCL or CUDA threads, and
    errors in that process have no errno.

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
            save(
                shards,
                storage_writer=FileSystemWriter(unfinished, sync_files=True),
                planner=torch_strategies.MCoreSavePlanner(flatten_state_dict=False),
                process_group=ranks.saving,
            )
        except CheckpointException as error:  # of all ranks
            cause = next(iter(error.failures.values()))[0]
            number = cause.errno if isinstance(cause, OSError) and cause.errno else errno.EIO
            reason = f"a rank could not write its part of the checkpoint: {cause}"
            raise OSError(number, reason, str(unfinished)) from error
        mine = [path for path in unfinished.iterdir() if _writer(path) == ranks.rank]
        files = {name: digest for part in gather({p.name: _hash(p) for p in mine}) for name, digest in part.items()}
        if gone := sorted(_on_first_rank(lambda: _stored_files(unfinished), gather) - files.keys()):
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
    found = ranks.gather([_problem(path, hashes[path.name]) for path in mine])
    if wrong := [problem for part in found for problem in part if problem]:
        raise TrainerCheckpointError(f"{directory} is damaged: {'; '.join(wrong)}; restore from an older checkpoint")
    require_same(directory, manifest.model, model, what="model")
    return manifest


def require_same(directory: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], *, what: str) -> None:
    """Compare properties in checkpoint `directory` with those that are required.

    Raises:
        TrainerCheckpointError: they differ.
    """
    if differing := [
        f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} here"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]:
        raise TrainerCheckpointError(
            f"{directory} is of another {what}: {'; '.join(differing)}; give one of this {what} and these settings"
        )


def require_complete(directory: Path) -> None:
    """Check that all files of checkpoint `directory` exist; their content is checked when it is restored.

    Raises:
        TrainerCheckpointError: the folder, its manifest or a file is missing.
    """
    _, hashes = _read_manifest(directory)
    if missing := sorted(name for name in hashes if not (directory / name).is_file()):
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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # megatron uses deprecated names of torch
            return cast(dict[str, Any], dist_checkpointing.load(state, str(directory)))
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


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _problem(path: Path, expected: str) -> str | None:
    """How a file differs from its hash; None if it does not."""
    try:
        return f"{path.name} has changed since it was written" if _hash(path) != expected else None
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"


def _stored_files(directory: Path) -> set[str]:
    """Names of all files that a checkpoint needs; its index names those of the tensors."""
    stored = FileSystemReader(directory).read_metadata().storage_data
    return {".metadata", "common.pt", "metadata.json", *(place.relative_path for place in stored.values())}


class _Copies(SaveShardedStrategy):
    """Takes what this rank has to write; megatron checks the shards and writes the rest."""

    shards: CopiedShards

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        parts, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(  # pyright: ignore[reportPrivateUsage]
            sharded_state_dict, keep_only_main_replica=True
        )
        for part in chain.from_iterable(parts.values()):
            if isinstance(part, ShardedTensor):  # the others are serialized below
                part.data = cast(Tensor, part.data).detach().to("cpu", copy=True)
        self.shards = torch_strategies.mcore_to_pyt_state_dict(parts)  # pyright: ignore[reportArgumentType]

    @property
    def can_handle_sharded_objects(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True
