"""A published version on its way into SGLang: what must be in it, where SGLang reads it, what it reports of the load.

SGLang skips tensors of unknown name without a word and dies of a wrong shape, so both are refused before it is asked.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import ContractError

Shapes = Mapping[str, tuple[int, ...]]
REPORTED = "loaded by rank: "  # in the message of an update; see sglang_side/plugin
HOOKS = (  # what the plugin must have wrapped in the server; see sglang_side/plugin
    "DefaultModelLoader.load_weights_only",
    "Scheduler.get_init_info",
    "Scheduler.flush_cache",
    "SchedulerWeightUpdaterManager.update_weights_from_disk",
    "ModelConfig._get_hf_eos_token_id",
    "schedule_batch.release_req",
    "Scheduler.send_abort_output",
    "ForwardBatch.init_new",
    "ModelRunner.forward",
    "topk.select_experts",
    "Sampler._sample_from_probs",
)


class Load(NamedTuple):
    """What the server reports of a load."""

    digest: str
    """Of the tensors that it read; the same on all ranks."""
    checksums: Sequence[Mapping[str, str]]
    """Of each tensor-parallel rank, parameter -> checksum after the load."""


def shapes_of(files: list[Path]) -> Shapes:
    """Name -> shape of every tensor in safetensors `files`; reads their headers only."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def check_update(update: WeightUpdate, expected: Shapes) -> None:
    """Refuse an update that is not, tensor for tensor, of the checkpoint that is served.

    Raises:
        ContractError: names the version, the file and the tensors.
    """
    what = f"version {update.weights.version} in {update.path}"
    try:
        found = shapes_of([update.path])
    except (OSError, SafetensorError) as error:
        raise ContractError(f"cannot read version {update.weights.version} from {update.path}: {error}") from error
    if absent := sorted(expected.keys() - found.keys()):
        raise ContractError(
            f"{what} lacks {len(absent)} tensors of the checkpoint ({', '.join(absent[:3])}, ...); export every tensor"
        )
    if unknown := sorted(found.keys() - expected.keys()):
        raise ContractError(
            f"{what} has {len(unknown)} tensors that the checkpoint has not ({', '.join(unknown[:3])}, ...), which "
            "SGLang would skip; export under the checkpoint's names"
        )
    for name, shape in found.items():
        if shape != expected[name]:
            raise ContractError(f"{what} has {name} of shape {list(shape)}; the checkpoint has {list(expected[name])}")


@contextmanager
def update_folder(update: WeightUpdate, parent: Path) -> Generator[Path]:
    """A folder with the one file of `update`, as SGLang loads every file of a folder."""
    folder = Path(tempfile.mkdtemp(prefix="update-", dir=parent))
    try:
        (folder / "model.safetensors").symlink_to(update.path.absolute())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def first_load(report: Mapping[str, Any]) -> Load:
    """What the server loaded at its start.

    Raises:
        ContractError: the plugin is not in the server, a hook does not apply, or see `reported_load`.
    """
    if not report:
        raise ContractError("the server reports no plugin; SGLANG_PLUGINS may exclude it")
    applied = "\n".join(report["hooks"])
    if missing := [hook for hook in HOOKS if hook not in applied]:
        raise ContractError(f"hooks of the plugin do not apply in this SGLang: {', '.join(missing)}")
    return _load_of(report["ranks"])


def reported_load(answer: Any) -> Load:
    """What the server loaded, from its answer to an update.

    Raises:
        ContractError: it loaded nothing, the ranks loaded different weights, or one has no checksums.
    """
    said, _, ranks = str(answer.get("message")).partition(REPORTED)
    if not answer.get("success") or not ranks:
        raise ContractError(f"the server loaded nothing and answers {said[:500]!r}")
    return _load_of(json.JSONDecoder().raw_decode(ranks)[0])  # SGLang adds words of its own after it


def _load_of(ranks: Sequence[Mapping[str, Any]]) -> Load:
    digests = sorted({rank["digest"] for rank in ranks})
    if len(digests) != 1 or not digests[0]:
        raise ContractError(f"the ranks of the server loaded weights with the digests {', '.join(digests)}")
    checksums = [rank["checksums"] for rank in ranks]
    if not all(checksums):
        raise ContractError("a rank of the server reports no checksums of its parameters")
    return Load(digests[0], checksums)
