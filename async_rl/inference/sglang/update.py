"""Checks a published version before SGLang loads it, and reads the server's report of the load.

SGLang silently skips tensors with unknown names and crashes on a wrong shape, so both are refused before the load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.inference.checkpoint_weights import Shapes, published_shapes
from async_rl.inference.loads import RankLoad, first_weights
from async_rl.weights.live import LiveWeights
from async_rl.weights.model_info import CheckpointError
from async_rl.weights.transport import UpdateError, WeightUpdate
from message_queue.errors import ContractError

REPORTED = "loaded by rank: "  # marks the plugin's report in the server's answer; see `plugin/`
NOT_STAGED = "not yet"  # the plugin's answer until all ranks have staged a version
HOOKS = (  # functions of SGLang that the plugin must have wrapped; see `plugin/`
    "DefaultModelLoader.load_weights_only",
    "Scheduler.get_init_info",
    "DataParallelController.get_init_info",
    "Scheduler.flush_cache",
    "TokenizerControlMixin.flush_cache",
    "SchedulerWeightUpdaterManager.update_weights_from_disk",
    "SchedulerWeightUpdaterManager.check_weights",
    "ModelConfig._get_hf_eos_token_id",
    "schedule_batch.release_req",
    "Scheduler.send_abort_output",
    "ForwardBatch.init_new",
    "ForwardBatch.prepare_mlp_sync_batch",
    "ModelRunner.forward",
    "topk.select_experts",
    "Sampler._sample_from_probs",
)


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
            "SGLang would skip; export with the checkpoint's tensor names"
        )
    for name, shape in found.items():
        if shape != expected[name]:
            raise ContractError(f"{what} has {name} of shape {list(shape)}; the checkpoint has {list(expected[name])}")


def first_load(report: Mapping[str, Any]) -> tuple[str, LiveWeights]:
    """Digest of all tensors that each rank loaded at the start of the server, and the content of its model.

    Args:
        report: see `SglangServer.report`.

    Raises:
        ContractError: the server runs without the plugin, a hook does not apply, the ranks loaded different weights, or
            a rank reports no parameters.
    """
    if not report:
        raise ContractError("the server runs without async_rl's plugin; check whether SGLANG_PLUGINS excludes it")
    applied = "\n".join(report["hooks"])
    if missing := [hook for hook in HOOKS if hook not in applied]:
        raise ContractError(f"the plugin's hooks do not apply in this SGLang: {', '.join(missing)}")
    digests = sorted({rank["digest"] for rank in report["ranks"]})
    if len(digests) != 1 or not digests[0]:
        raise ContractError(f"the ranks of the server loaded weights with the digests {', '.join(digests)}")
    _check_parameters(report["ranks"])
    return digests[0], first_weights(report["ranks"])


def reported_load(answer: Any) -> list[RankLoad]:
    """Report of each rank, from the server's answer to /update_weights_from_disk.

    Raises:
        ContractError: the server loaded nothing, or a rank reports no parameters.
    """
    said, _, given = str(answer.get("message")).partition(REPORTED)
    ranks = json.JSONDecoder().raw_decode(given)[0] if given else []  # SGLang appends text after the JSON
    if not answer.get("success") or not ranks:
        raise ContractError(f"the server loaded nothing and answers {said[:500]!r}")
    _check_parameters(ranks)
    return [RankLoad.of(rank) for rank in ranks]


def staged_load(answer: Any) -> list[RankLoad] | None:
    """As `reported_load`, from the answer to the plugin's action `staged`; None until all ranks have staged a version.

    The schedulers of all groups of attention data parallelism answer, each for all ranks, separated by bars.
    """
    return None if NOT_STAGED in answer["message"].split(" | ") else reported_load(answer)


def _check_parameters(ranks: Sequence[Mapping[str, Any]]) -> None:
    if not all(rank["parameters"] for rank in ranks):
        raise ContractError("a rank of the server reports no parameters")
