"""Quantized Hugging Face checkpoint -> plain bfloat16 checkpoint for trainer, engines and export.

Two formats are read. FP8 (DeepSeek-V3, Qwen3-*-FP8): `NAME` in float8_e4m3fn with `NAME_scale_inv`, a factor for each
block of `weight_block_size`. MXFP4 (gpt-oss): `NAME_blocks` with two 4-bit numbers in a byte, and `NAME_scales` with an
exponent for each 32 numbers. `async_rl.weights.model_info.quantization_problem` refuses all others.

    kv_a_proj  [576, 7168] float8, kv_a_proj_scale_inv [5, 56]: rows 512..575 are the ragged last block of scale row 4
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from async_rl.files.atomic_dir import make_folder
from async_rl.weights.model_info import CheckpointError
from async_rl.weights.pretrained import write_checkpoint

FORMAT = 1  # part of the cache key: raise it when the same checkpoint gives other files
DTYPE = torch.bfloat16
_FP8_SCALE, _FP4_BLOCKS, _FP4_SCALE = "_scale_inv", "_blocks", "_scales"
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the numbers 0..7; 8..15 are their negatives
_FP4_BIAS = 127  # of the exponents
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of a value, in tensors that are not quantized


class DequantizationStopped(Exception):
    """The caller no longer needs the plain checkpoint."""


def plain_folder(checkpoint: Path, *, cache: Path) -> Path:
    """Folder of the plain copy of a quantized checkpoint; it exists once `dequantize` has run.

    The name has a hash of config.json and of path, size and time of each weight file.
    """
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(checkpoint.glob("*.safetensors"))]
    config = (checkpoint / "config.json").read_text()
    made_from = json.dumps([FORMAT, str(checkpoint.resolve()), config, files])
    return cache / f"{checkpoint.name}-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}"


def dequantize(
    checkpoint: Path,
    folder: Path,
    *,
    stopped: threading.Event | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the plain copy of `checkpoint` into `folder`, complete or not at all.

    Tensors are read one by one, and at most one shard is in memory. All tensors are written, also those of layers for
    multi-token prediction. Tensors that are not quantized keep their dtype.

    Args:
        stopped: ends the work if it is set.
        progress: called with (tensors written, tensors in all) before each tensor.

    Raises:
        CheckpointError: a tensor cannot be dequantized, or another process writes `folder`.
        DequantizationStopped: `stopped` was set.
        OSError: the disk has no free space, or `folder` is not writable.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        plain = _PlainTensors(checkpoint)
        for done, name in enumerate(plain.names):
            if stopped is not None and stopped.is_set():
                raise DequantizationStopped
            progress(done, len(plain.names))
            yield name, plain.read(name)

    make_folder(folder.parent)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is dequantizing {checkpoint} into {folder}; start again when it is done, or set "
                "another model.cache"
            ) from error
        if not folder.is_dir():
            write_checkpoint(folder, tensors(), like=checkpoint, without=("quantization_config",))


def plain_sizes(checkpoint: Path) -> Iterator[tuple[str, int]]:
    """(name, number of values) of each plain tensor of a quantized checkpoint; reads only the headers of the files.

    Raises:
        CheckpointError: a tensor cannot be dequantized.
    """
    plain = _PlainTensors(checkpoint)
    return ((name, plain.layout(name)[0]) for name in plain.names)


def dequantization_problems(checkpoint: Path, *, folder: Path) -> Iterator[str]:
    """Tensors that cannot be dequantized, and missing space for `folder`; reads only the headers of the files."""
    plain = _PlainTensors(checkpoint)
    needed, problems = 0, list[str]()
    for name in plain.names:
        try:
            needed += math.prod(plain.layout(name))
        except CheckpointError as error:
            problems.append(f"{error}")
    if problems:
        more = f" ({len(problems)} such tensors)" if len(problems) > 1 else ""
        yield f"model.checkpoint: {problems[0]}{more}"
    there = next(path for path in (folder.parent, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if not folder.is_dir() and needed > free:
        yield (
            f"model.cache is {folder.parent}, with {free:,} free bytes; the plain copy of {checkpoint} takes "
            f"{needed:,}; set model.cache to a folder with more space"
        )


def dequantize_fp8(weight: Tensor, scale: Tensor, *, block: Sequence[int]) -> Tensor:
    """bfloat16 [rows, columns]: `weight` float8 times the scale of its block.

    With block (2, 2), weights of 1 and scales ((1, 2), (3, 4)), a [3, 3] weight becomes
    ((1, 1, 2), (1, 1, 2), (3, 3, 4)). Products are rounded to float32 first.

    Args:
        weight: float8_e4m3fn [rows, columns].
        scale: [rows / block[0], columns / block[1]], both rounded up.
        block: rows and columns of a block; the last blocks may be smaller.
    """
    plain = torch.empty(weight.shape, dtype=DTYPE)
    for number, factors in enumerate(scale.float()):
        rows = slice(number * block[0], (number + 1) * block[0])
        plain[rows] = weight[rows].float() * factors.repeat_interleave(block[1])[: weight.shape[1]]
    return plain


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [experts, columns, rows], the transpose of the stored rows.

    The byte 0x2A with the exponent 128 becomes the columns (-1 * 2, 1 * 2): the low half is the first number, 0xA = -1.

    Args:
        blocks: uint8 [experts, rows, columns / 32, 16], two numbers in a byte.
        scales: uint8 [experts, rows, columns / 32], exponents plus 127.
    """
    experts, rows, groups, width = blocks.shape
    values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    plain = torch.empty((experts, 2 * groups * width, rows), dtype=DTYPE)
    for expert in range(experts):
        numbers = torch.stack((blocks[expert] & 15, blocks[expert] >> 4), dim=-1).flatten(-2)
        exponents = scales[expert].int().unsqueeze(-1) - _FP4_BIAS
        plain[expert] = torch.ldexp(values[numbers.int()], exponents).flatten(-2).T
    return plain


def plain_names(saved: Collection[str]) -> Iterator[str]:
    """Names of the plain tensors of saved ones: without scales, and without the ending `_blocks` of numbers."""
    for name in saved:
        number = name.removesuffix(_FP4_BLOCKS)
        if name.endswith(_FP8_SCALE) and name.removesuffix(_FP8_SCALE) in saved:
            continue
        if name.endswith(_FP4_SCALE) and name.removesuffix(_FP4_SCALE) + _FP4_BLOCKS in saved:
            continue
        yield number if number + _FP4_SCALE in saved else name


class _PlainTensors:
    """Plain tensors of a quantized checkpoint folder; a tensor and its scales may be in different files.

    Raises:
        CheckpointError: the folder has no usable files.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
        self._block: list[int] = config["quantization_config"].get("weight_block_size") or [1, 1]
        self._saved: dict[str, Any] = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            file = safe_open(path, "pt")
            self._saved |= dict.fromkeys(file.keys(), file)
        self.names = [*plain_names(self._saved)]
        """Of the plain tensors, in the order of the files."""

    def read(self, name: str) -> Tensor:
        """A plain tensor.

        Raises:
            CheckpointError: it cannot be dequantized.
        """
        self.layout(name)  # checks it
        if self._is_fp4(name):
            return dequantize_mxfp4(self._tensor(name + _FP4_BLOCKS), self._tensor(name + _FP4_SCALE))
        saved = self._tensor(name)
        if name + _FP8_SCALE not in self._saved:
            return saved
        return dequantize_fp8(saved, self._tensor(name + _FP8_SCALE), block=self._block)

    def layout(self, name: str) -> tuple[int, int]:
        """(number of values, bytes of a value) of a plain tensor, from the headers of the files.

        Raises:
            CheckpointError: dtypes and shapes of the saved tensor and its scales do not fit.
        """
        if self._is_fp4(name):
            (kind, shape), (scale_kind, grid) = self._header(name + _FP4_BLOCKS), self._header(name + _FP4_SCALE)
            if (kind, scale_kind) != ("U8", "U8") or shape != [*grid, 16] or len(shape) != 4:
                raise CheckpointError(
                    f"{self._checkpoint}: {name}_blocks is {kind} {shape} with scales {scale_kind} {grid}; they must "
                    "be U8 with one scale for each 16 bytes; copy the complete folder again"
                )
            return 2 * math.prod(shape), DTYPE.itemsize
        kind, shape = self._header(name)
        if name + _FP8_SCALE in self._saved:
            grid = self._header(name + _FP8_SCALE)[1]
            blocks = [-(-length // size) for length, size in zip(shape, self._block, strict=False)]
            if kind != "F8_E4M3" or len(shape) != 2 or grid != blocks:
                raise CheckpointError(
                    f"{self._checkpoint}: {name} is {kind} {shape} with scales {grid}, which are not one for each "
                    f"block of weight_block_size={self._block}; config.json and weights do not belong together"
                )
            return math.prod(shape), DTYPE.itemsize
        if kind not in _SIZES:
            raise CheckpointError(
                f"{self._checkpoint}: {name} is {kind} without scales; copy the complete folder again"
            )
        return math.prod(shape), _SIZES[kind]

    def _is_fp4(self, name: str) -> bool:
        return name + _FP4_BLOCKS in self._saved and name + _FP4_SCALE in self._saved

    def _header(self, name: str) -> tuple[str, list[int]]:
        saved = self._saved[name].get_slice(name)
        return saved.get_dtype(), list(saved.get_shape())

    def _tensor(self, name: str) -> Tensor:
        return self._saved[name].get_tensor(name)
