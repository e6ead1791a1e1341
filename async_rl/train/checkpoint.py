"""State of the trainer on disk: one folder for all ranks, which appears whole or not, and fits every parallel layout.

    trainer.json      Manifest: what the rest is, and a hash of every other file
    __R_0.distcp      the parts of tensors that rank R wrote; with .metadata, common.pt and metadata.json it is a
                      checkpoint of megatron.core.dist_checkpointing (torch_dist)

Tensors are stored under the names of megatron's modules, with global layer and expert numbers; their whole shapes are
the same in every layout, up to the padding of the vocabulary.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from torch.distributed.checkpoint.api import CheckpointException

from async_rl.folders import partial_folder, publish_folder, recover_folder
from async_rl.train.families import ModelShape
from async_rl.train.shards import read_shards, write_shards

Value = TypeVar("Value")
FORMAT = 3
_MANIFEST = "trainer.json"


class TrainerCheckpointError(ValueError):
    """A folder that cannot be restored from; names it and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """model: fields that a trainer must agree with. layout: names and sizes of the parallel groups that wrote it.

    updates: made so far, as the learning rate counts them. steps: as Adam counts them.
    reference: whether the frozen weights of a KL term are in it.
    """

    model: dict[str, Any]
    layout: dict[str, int]
    updates: int
    steps: int
    reference: bool


class Ranks(Protocol):
    """The ranks that share a checkpoint."""

    rank: int
    size: int

    def gather(self, value: object) -> list[Any]:
        """The value of every rank. Collective."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    format: int
    manifest: Manifest
    files: dict[str, str]


def save_state(directory: Path, state: dict[str, Any], *, manifest: Manifest, ranks: Ranks) -> None:
    """Write nested shards as checkpoint `directory`; the folder appears when all is on disk. Collective.

    Raises:
        OSError: no room or no permission, on every rank; a checkpoint that was there stays.
    """
    try:
        _write(directory, state, manifest, ranks=ranks)
    except OSError:
        _on_first_rank(lambda: recover_folder(directory), ranks)  # a full disk has its room back
        raise


def _write(directory: Path, state: dict[str, Any], manifest: Manifest, *, ranks: Ranks) -> None:
    partial = partial_folder(directory)

    def begin() -> None:
        recover_folder(directory)
        partial.mkdir(parents=True)

    _on_first_rank(begin, ranks)
    try:
        write_shards(partial, state)
    except CheckpointException as error:
        raise _os_error(error, partial) from error
    mine = [path for path in partial.iterdir() if _writer(path) == ranks.rank]
    files = {name: value for part in ranks.gather(_hashes(mine)) for name, value in part.items()}
    document = msgspec.json.encode(_Document(format=FORMAT, manifest=manifest, files=files))

    def finish() -> None:
        (partial / _MANIFEST).write_bytes(document)
        publish_folder(directory)

    _on_first_rank(finish, ranks)


def read_manifest(directory: Path, *, model: Mapping[str, Any], ranks: Ranks) -> Manifest:
    """What is in checkpoint `directory`, once every file is seen to be as it was written. Collective.

    Args:
        model: what `Manifest.model` has to be.

    Raises:
        TrainerCheckpointError: no such folder, damaged, of another format or model; the same on every rank.
    """
    document = _on_first_rank(lambda: _read_document(directory), ranks)
    mine = [directory / name for name in sorted(document.files)[ranks.rank :: ranks.size]]
    wrong = [problem for part in ranks.gather(_problems(mine, document.files)) for problem in part]
    if wrong:
        raise TrainerCheckpointError(f"{directory} is damaged: {'; '.join(wrong)}; restore from an older checkpoint")
    held = document.manifest.model
    differing = [
        f"{name} is {held.get(name)!r} there and {model.get(name)!r} here"
        for name in sorted({*held, *model})
        if held.get(name) != model.get(name)
    ]
    if differing:
        raise TrainerCheckpointError(
            f"{directory} is of another model: {'; '.join(differing)}; give a checkpoint of this model and dtype"
        )
    return document.manifest


def require_complete(directory: Path) -> None:
    """Check that this process sees every file of checkpoint `directory`; their content is checked on a restore.

    Raises:
        TrainerCheckpointError: the folder, its manifest or a file of a rank is missing.
    """
    missing = sorted(name for name in _read_document(directory).files if not (directory / name).is_file())
    if missing:
        raise TrainerCheckpointError(f"{directory} lacks {', '.join(missing)}, which the ranks have written elsewhere")


def load_state(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Tensors in the place of the shards in `state`. Collective; after `read_manifest`.

    Raises:
        TrainerCheckpointError: a tensor is missing or of another shape. The trainer must not be used then.
    """
    try:
        return read_shards(directory, state)
    except Exception as error:
        raise TrainerCheckpointError(
            f"{directory} does not fit this trainer: {error}; give a checkpoint that the same model has saved"
        ) from error


def fields_of(shape: ModelShape, *, dtype: str) -> dict[str, Any]:
    """`Manifest.model` of a model, in a form that JSON gives back unchanged."""
    fields = {**shape.megatron, "vocab_size": shape.vocab_size, "tied": shape.tied, "dtype": dtype}
    return msgspec.json.decode(msgspec.json.encode(fields, enc_hook=str))


def _on_first_rank(work: Callable[[], Value], ranks: Ranks) -> Value:
    """Do it on rank 0; every rank returns its result or raises its error."""
    outcome: tuple[Value | None, Exception | None] = None, None
    if ranks.rank == 0:
        try:
            outcome = work(), None
        except (OSError, TrainerCheckpointError) as error:
            outcome = None, error
    value, failure = ranks.gather(outcome)[0]
    if failure is not None:
        raise failure
    return value


def _writer(path: Path) -> int:
    """The rank that wrote a file of the folder."""
    return int(path.name.split("_")[2]) if path.name.startswith("__") else 0


def _read_document(directory: Path) -> _Document:
    recover_folder(directory)
    path = directory / _MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TrainerCheckpointError(
            f"{directory} has no readable {_MANIFEST} ({error.strerror}); give a folder that a trainer has saved"
        ) from error
    try:
        found = msgspec.json.decode(data).get("format")
        if found == FORMAT:
            return msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, AttributeError) as error:
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
                found.append(f"{path.name} is not what was written")
        except OSError as error:
            found.append(f"{path.name} cannot be read ({error.strerror})")
    return found


def _os_error(error: CheckpointException, partial: Path) -> OSError:
    """The first error of a rank that torch has gathered."""
    cause = next(iter(error.failures.values()))[0]
    number = cause.errno if isinstance(cause, OSError) and cause.errno else errno.EIO
    return OSError(number, f"a rank could not write its part of the checkpoint: {cause}", str(partial))
