"""A published version on its way into SGLang: what must be in it, where SGLang reads it, what it says it loaded.

SGLang skips tensors of unknown name without a word and dies of a wrong shape, so both are refused before it is asked.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import ContractError

Shapes = Mapping[str, tuple[int, ...]]
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


def first_digest(report: Mapping[str, Any]) -> str:
    """Digest of what the server loaded at its start.

    Raises:
        ContractError: the plugin is not in the server, a hook does not apply, or the ranks loaded different weights.
    """
    if not report:
        raise ContractError("the server reports no plugin; SGLANG_PLUGINS may exclude it")
    applied = "\n".join(report["hooks"])
    if missing := [hook for hook in HOOKS if hook not in applied]:
        raise ContractError(f"hooks of the plugin do not apply in this SGLang: {', '.join(missing)}")
    return _one(report["digests"])


def loaded_digest(answer: Any) -> str:
    """Digest of what the server says that it loaded.

    Raises:
        ContractError: it loaded nothing, or the ranks loaded different weights.
    """
    said = re.search(r"loaded digests=([0-9a-f,]*);", str(answer.get("message")))
    if not answer.get("success") or said is None:
        raise ContractError(f"the server says {answer}")
    return _one(said[1].split(","))


def live_checksums(answer: Any) -> list[dict[str, str]]:
    """Of each rank, parameter -> checksum of what the server's model holds, from its answer to /weights_checker.

    Raises:
        ContractError: the server gave none.
    """
    ranks = answer.get("ranks") if answer.get("success") else None
    if not ranks or not all(rank.get("checksums") for rank in ranks):
        raise ContractError(f"the server gives no checksums of its weights: {str(answer)[:500]}")
    return [rank["checksums"] for rank in sorted(ranks, key=_number_of_rank)]


def _number_of_rank(rank: Mapping[str, Any]) -> int:
    return int(rank["parallelism_info"][0]["rank"])


def _one(digests: list[str]) -> str:
    if len(digests) != 1 or not digests[0]:
        raise ContractError(f"the ranks of the server loaded weights with the digests {', '.join(digests)}")
    return digests[0]
