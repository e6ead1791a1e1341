"""Writes Hugging Face checkpoint folders: config, tokenizer and sharded safetensors, for transformers and vLLM."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from async_rl.files.atomic_dir import make_folder, partial_folder, publish_folder, recover_folder
from async_rl.weights.model_info import TEXT_CONFIG, is_carried, read_config

MAX_SHARD_BYTES = 5_000_000_000  # as in huggingface_hub; its writer is not used because it needs all tensors at once
INDEX = "model.safetensors.index.json"
WEIGHT_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.h5", "*.msgpack"),
    *("*.gguf", "*.onnx", "original", ".*"),
)


def save_pretrained(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, like: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a checkpoint with the tensors of `carried_tensors` of `like`; see `write_checkpoint`."""
    carried = carried_tensors(like)
    write_checkpoint(folder, itertools.chain(tensors, carried), like=like, max_shard_bytes=max_shard_bytes)


def write_checkpoint(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    like: Path,
    without: Sequence[str] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint atomically: `folder` is created or replaced with complete content, or left unchanged.

    At most one shard is in memory.

    Args:
        folder: checkpoint folder to write.
        tensors: (Hugging Face name, tensor), read one by one.
        like: checkpoint folder whose other files are copied. `dtype` in config.json is set to the dtype of `tensors`.
        without: fields that are removed from config.json.
        max_shard_bytes: bound on the tensors of a file, unless a single tensor is larger.

    Raises:
        OSError: the disk has no free space or `folder` is not writable; an existing folder is unchanged.
    """
    with _whole_folder(folder) as partial:
        copy_model_files(like, partial)
        shards = _Shards(partial, max_bytes=max_shard_bytes)
        for name, tensor in tensors:
            shards.add(name, tensor.detach().to("cpu").contiguous())
        shards.finish()
        _edit_config(partial / "config.json", dtype=shards.dtype, without=without)


def save_adapter(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    rank: int,
    alpha: float,
    target_modules: Sequence[str],
    start: Path,
) -> None:
    """Write LoRA adapters as a folder of PEFT, atomically as `save_pretrained`.

    Args:
        folder: folder to write.
        tensors: (name of the module followed by `.lora_A.weight` or `.lora_B.weight`, tensor).
        rank: LoRA rank.
        alpha: the product of the adapters is multiplied by alpha / rank.
        target_modules: last parts of the names of the modules.
        start: checkpoint folder that the adapters belong to.

    Raises:
        OSError: the disk has no free space or `folder` is not writable; an existing folder is unchanged.
    """
    content = {f"base_model.model.{name}": tensor.to("cpu").contiguous() for name, tensor in tensors}
    found = {name.split(".")[-3] for name in content}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(start),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [name for name in target_modules if name in found],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with _whole_folder(folder) as partial:
        partial.mkdir()
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(content, partial / "adapter_model.safetensors", metadata={"format": "pt"})


@contextmanager
def _whole_folder(folder: Path) -> Generator[Path]:
    """Yield the path of a folder to make; it then replaces `folder`."""
    make_folder(folder.parent)
    recover_folder(folder)
    try:
        yield partial_folder(folder)
        publish_folder(folder)
    except BaseException:
        recover_folder(folder)  # free the space of the partial copy
        raise


def carried_tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a checkpoint folder that are exported unchanged; see `is_carried`. Others are not read."""
    config = read_config(checkpoint)
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if is_carried(name, num_layers=config["num_hidden_layers"]):
                    yield name, file.get_tensor(name)


def copy_model_files(checkpoint: Path, folder: Path) -> None:
    """Copy all files of a checkpoint folder except its weights into the new folder `folder`."""
    ignore = shutil.ignore_patterns(*WEIGHT_FILES)
    shutil.copytree(checkpoint, folder, ignore=ignore, copy_function=shutil.copyfile)
    folder.chmod(0o755)  # copytree copies the mode; it may be read-only


def keep_model_files(checkpoint: Path, folder: Path) -> None:
    """Replace `folder` with the files of a checkpoint except the weights that are trained.

    Adds generation_config.json if it is missing.
    """
    from transformers import AutoConfig, GenerationConfig

    with _whole_folder(folder) as partial:
        copy_model_files(checkpoint, partial)
        if not (partial / "generation_config.json").exists():
            GenerationConfig.from_model_config(AutoConfig.from_pretrained(partial)).save_pretrained(partial)
        shards = _Shards(partial, max_bytes=MAX_SHARD_BYTES)
        for name, tensor in carried_tensors(checkpoint):
            shards.add(name, tensor)
        shards.finish()


def sampled_digest(checkpoint: Path) -> str:
    """Hash of names, shapes and the first 1024 bytes of every tensor of a checkpoint folder; the rest is not read.

    Training changes all parts of a tensor, so that two checkpoints of one model differ in it. It does not matter
    how the tensors are spread over files.
    """
    entries: dict[str, bytes] = {}
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                start, end = tensor["data_offsets"]
                file.seek(8 + size + start)
                entries[name] = f"{tensor['dtype']} {tensor['shape']} ".encode() + file.read(min(1024, end - start))
    content = hashlib.blake2b(digest_size=16)
    for name in sorted(entries):
        content.update(f"{name} ".encode() + entries[name])
    return content.hexdigest()


class _Shards:
    """Collects tensors and writes a file before the next tensor would make it larger than `max_bytes`.

    Tensors of 3, 3 and 2 bytes with max_bytes=5: the files have 3 and 5 bytes.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._written: list[list[str]] = []
        self._bytes_of: dict[torch.dtype, int] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of most bytes; a few tensors, such as the correction bias of a router, may have another dtype."""
        return max(self._bytes_of, key=lambda dtype: self._bytes_of[dtype])

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a CPU tensor."""
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._write()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes
        self._bytes_of[tensor.dtype] = self._bytes_of.get(tensor.dtype, 0) + tensor.nbytes

    def finish(self) -> None:
        """Write the last file, then rename all files, because their names contain the number of files."""
        if not self._bytes_of:
            return
        self._write()
        count = len(self._written)
        if count == 1:
            self._path(1).rename(self._folder / "model.safetensors")
            return
        file_of: dict[str, str] = {}
        for number, names in enumerate(self._written, start=1):
            path = self._path(number).rename(self._folder / f"model-{number:05d}-of-{count:05d}.safetensors")
            file_of |= dict.fromkeys(names, path.name)
        index = {"metadata": {"total_size": sum(self._bytes_of.values())}, "weight_map": file_of}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        self._written.append(list(self._pending))
        path = self._path(len(self._written))
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod((self._folder / "config.json").stat().st_mode)  # safetensors makes it readable by the owner only
        self._pending, self._pending_bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number}.safetensors"


def _edit_config(path: Path, *, dtype: torch.dtype, without: Sequence[str]) -> None:
    """Remove fields of a config.json, and set `dtype`, and the older key `torch_dtype` if present."""
    config: dict[str, Any] = json.loads(path.read_text())
    config = {name: value for name, value in config.items() if name not in without}
    for part in (config, *([config[TEXT_CONFIG]] if TEXT_CONFIG in config else [])):
        for key in ("dtype", *(["torch_dtype"] if "torch_dtype" in part else [])):
            part[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
