"""Files, names and shapes of the tensors of a Hugging Face checkpoint or a published version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from async_rl.weights.model_info import CheckpointError, ModelInfo, is_carried
from async_rl.weights.transport import UpdateError, WeightUpdate, update_files
from message_queue.errors import ContractError

Shapes = Mapping[str, tuple[int, ...]]
INDEX = "model.safetensors.index.json"


def weight_files(checkpoint: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder.

    Raises:
        CheckpointError: the folder has no safetensors file, or a file of the index is missing.
    """
    if (checkpoint / INDEX).is_file():
        try:
            named = set(json.loads((checkpoint / INDEX).read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{checkpoint / INDEX} is no index ({error!r}); copy it again") from error
        files = sorted(checkpoint / name for name in named)
    else:
        files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"model checkpoint {checkpoint} has no *.safetensors file; save it with save_pretrained")
    if absent := [path.name for path in files if not path.is_file()]:
        raise CheckpointError(
            f"model checkpoint {checkpoint} lacks {', '.join(absent)}, which its index names; copy it"
        )
    return files


def tensor_shapes(files: list[Path]) -> Shapes:
    """Name -> shape of every tensor in safetensors `files`; reads their headers only.

    Raises:
        CheckpointError: a file is damaged or incomplete.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); copy it again") from error
    return shapes


def served_shapes(checkpoint: Path, info: ModelInfo) -> Shapes:
    """Name -> shape of the tensors that every version of a served checkpoint must contain; errors as for its parts."""
    shapes = tensor_shapes(weight_files(checkpoint))
    return {name: shape for name, shape in shapes.items() if not is_carried(name, num_layers=info.num_layers)}


def published_shapes(update: WeightUpdate, *, timeout_s: float) -> Shapes:
    """Name -> shape of every tensor of a version, without their content.

    Args:
        update: the version.
        timeout_s: bound in seconds on the answer of a trainer rank, if the version is in its memory.

    Raises:
        CheckpointError: a file is damaged.
        UpdateError: a bucket is missing, or a trainer rank does not answer.
    """
    if update.direct is None:
        return tensor_shapes(update_files(update.path))
    from async_rl.weights.broadcast import described  # imports torch; a configuration does without

    return described(update.path.name, update.direct, timeout_s=timeout_s)


def check_update(update: WeightUpdate, expected: Shapes, *, timeout_s: float) -> None:
    """Refuse an update whose tensors differ from those of the served checkpoint in name or shape.

    Args:
        expected: names and shapes of the checkpoint's tensors.
        timeout_s: see `published_shapes`.

    Raises:
        ContractError: the message names the version, the file and the tensors.
    """
    what = f"version {update.weights.version} in {update.path}"
    try:
        found = published_shapes(update, timeout_s=timeout_s)
    except (CheckpointError, UpdateError) as error:
        raise ContractError(f"cannot read version {update.weights.version} from {update.path}: {error}") from error
    if absent := sorted(expected.keys() - found.keys()):
        raise ContractError(
            f"{what} lacks {len(absent)} tensors of the checkpoint ({', '.join(absent[:3])}, ...); export every tensor"
        )
    if unknown := sorted(found.keys() - expected.keys()):
        raise ContractError(
            f"{what} has {len(unknown)} tensors that the checkpoint lacks ({', '.join(unknown[:3])}, ...), which "
            "an engine would skip; export with the checkpoint's tensor names"
        )
    for name, shape in found.items():
        if shape != expected[name]:
            raise ContractError(f"{what} has {name} of shape {list(shape)}; the checkpoint has {list(expected[name])}")
