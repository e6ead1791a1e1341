"""Reads the reports of SGLang's server on its start and on its loads; the plugin in `plugin/` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.inference.loads import RankLoad, first_weights
from async_rl.weights.live import LiveWeights
from message_queue.errors import ContractError

REPORTED = "loaded by rank: "  # marks the plugin's report in the server's answer; see `plugin/`
NOT_STAGED = "not yet"  # the plugin's answer until all ranks have staged a version


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
    if report["unapplied"]:
        raise ContractError(f"the plugin's hooks do not apply in this SGLang: {', '.join(report['unapplied'])}")
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
