"""A malformed answer of a running engine is refused at the edge; the request may be made again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent_loop.engine import AnswerError
from async_rl.inference.vllm import engine as vllm_engine
from async_rl.inference.vllm.engine import VllmReplica
from message_queue.tokens import RoutedExperts, TokenOutput
from tests.conformance.conftest import generate, prompt, request

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.filterwarnings("ignore")]

Spoil = Callable[[Any], None]


def rows(change: Callable[[Any], Any]) -> Spoil:
    """Spoil the routed experts."""

    def spoil(completion: Any) -> None:
        completion.routed_experts = change(completion.routed_experts.copy())

    return spoil


def entry(position: int, value: Any) -> Spoil:
    """Set the experts of one position in every layer."""

    def change(experts: Any) -> Any:
        experts = experts.astype(np.int32)
        experts[position, 1:] = value
        return experts

    return rows(change)


def logprob(value: Any) -> Spoil:
    def spoil(completion: Any) -> None:
        flat = completion.logprobs
        numbers = [*flat.logprobs[:2], value, *flat.logprobs[3:]]
        completion.logprobs = SimpleNamespace(token_ids=list(flat.token_ids), logprobs=numbers)

    return spoil


def token(value: int) -> Spoil:
    def spoil(completion: Any) -> None:
        completion.token_ids = [*completion.token_ids[:-1], value]

    return spoil


def versions(*spans: tuple[str, int, int]) -> Spoil:
    def spoil(completion: Any) -> None:
        known = completion.weight_versions[0].version
        completion.weight_versions = [
            SimpleNamespace(version=version or known, start=start, end=end) for version, start, end in spans
        ]

    return spoil


def field(name: str, value: Any) -> Spoil:
    return lambda completion: setattr(completion, name, value)


MALFORMED: dict[str, tuple[Spoil, str]] = {
    "wrong row count": (rows(lambda e: e[1:]), r"routed_experts has shape \[22, 4, 2\]; need \[23, 4, 2\]"),
    "too many rows": (rows(lambda e: np.concatenate([e, e[:1]])), r"routed_experts has shape \[24, 4, 2\]"),
    "wrong layers": (rows(lambda e: e[:, :3]), r"routed_experts has shape \[23, 3, 2\]; need \[23, 4, 2\]"),
    "wrong top-k": (rows(lambda e: e[..., :1]), r"routed_experts has shape \[23, 4, 1\]"),
    "no rows": (field("routed_experts", None), r"routed_experts has shape None; need \[23, 4, 2\]"),
    "duplicate experts": (entry(3, 5), r"duplicate expert at position 3, MoE layer index 0: \[5, 5\]"),
    "expert out of range": (entry(3, [1, 8]), r"routed_experts has expert ids 0..8; the model has 8"),
    "expert that would wrap around": (entry(3, [1, 258]), r"expert ids 0..258; the model has 8"),
    "negative expert": (entry(3, [1, -1]), r"expert ids -1..7; the model has 8"),
    "other experts than forced": (entry(3, [6, 7]), r"routed_experts at position 3 are .* forced were"),
    "NaN logprob": (logprob(float("nan")), r"logprobs\[2\] is nan; logprobs are finite"),
    "infinite logprob": (logprob(float("-inf")), r"logprobs\[2\] is -inf"),
    "positive logprob": (logprob(0.5), r"logprobs\[2\] is 0.5"),
    "no number": (logprob(None), r"logprobs\[2\] is nan"),
    "text": (logprob("x"), r"logprobs are no float32 numbers"),
    "no logprobs": (field("logprobs", None), r"logprobs are not of its 4 sampled tokens: None entries"),
    "logprobs of other tokens": (token(3), r"logprobs are not of its 4 sampled tokens"),
    "token out of range": (token(117), r"token_ids spans .*117; the vocabulary has 117"),
    "token that would overflow": (token(1 << 40), r"token_ids spans"),
    "too many tokens": (field("token_ids", [3] * 5), r"token_ids has 5 tokens; the request is for 4"),
    "unknown end": (field("finish_reason", "repetition"), r"finish_reason is 'repetition'; known are stop"),
    "no version": (field("weight_versions", None), r"weight versions cover \[\] tokens; 4 were sampled"),
    "unknown version": (versions(("9:x", 0, 4)), r"weight_versions are .*9:x.*; need spans without gaps of 0:"),
    "version gap": (versions(("", 0, 1), ("", 2, 4)), r"weight_versions are .*; need spans without gaps"),
    "version short": (versions(("", 0, 3)), r"weight versions cover \[3\] tokens; 4 were sampled"),
}


@pytest.mark.parametrize(("spoil", "message"), MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_answer_names_replica_request_field_and_value(
    replica: VllmReplica, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, message: str
):
    translate = vllm_engine.to_segments

    def spy(output: Any, **context: Any) -> list[TokenOutput]:
        spoil(output.outputs[0])
        return translate(output, **context)

    forced = RoutedExperts(first_position=0, experts=np.tile(np.array([1, 2], np.uint8), (19, 3, 1)))
    if "duplicate" in message or "expert ids" in message:
        forced = None  # a wrong row would be told from the forced one first
    ask = request("asked", prompt(20), max_new_tokens=4, forced_experts=forced)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine, "to_segments", spy)
        with pytest.raises(AnswerError, match=f"^replica-0: request asked: .*{message}"):
            await replica.generate(ask)
    assert (await replica.stats()).in_flight == 0
    assert len(await generate(replica, ask)) == 4, "the request may be made again"
