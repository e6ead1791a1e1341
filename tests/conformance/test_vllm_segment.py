"""From vLLM's output to a segment: nothing malformed passes. Needs no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent_loop.engine import GenerateRequest
from async_rl.engines.vllm_segment import to_segment
from async_rl.model_info import ModelInfo
from message_queue.tokens import ContractError, RoutingSpec, StopReason, TokenOutput, WeightVersion

ROUTING = RoutingSpec(layers=(1, 3), num_experts=8, top_k=2)
INFO = ModelInfo(family="qwen3_moe", vocab_size=50, num_layers=4, context_length=100, routing=ROUTING)
TOKENS = np.arange(5, dtype=np.int32)


def completion(**changes: Any) -> SimpleNamespace:
    """Three tokens after five, with rows from position 2 on."""
    experts = np.zeros((5, 4, 2), np.uint8)
    experts[:, [1, 3]] = np.arange(20).reshape(5, 2, 2) % 8
    good = {
        "token_ids": [7, 8, 9],
        "logprobs": SimpleNamespace(token_ids=[7, 8, 9], logprobs=[-0.5, -1.0, -2.0]),
        "routed_experts": experts,
        "finish_reason": "stop",
    }
    return SimpleNamespace(**{**good, **changes})


def translate(*completions: Any, routing: RoutingSpec | None = ROUTING, rows_held: int = 2) -> TokenOutput:
    request = GenerateRequest(request_id="a", token_ids=TOKENS, max_new_tokens=9, rows_held=rows_held)
    return to_segment(
        SimpleNamespace(outputs=list(completions)),  # pyright: ignore[reportArgumentType]
        request=request,
        info=INFO,
        routing=routing,
        weights=WeightVersion(3, "d"),
        replica="replica-0",
    )


def test_rows_are_those_of_the_moe_layers_from_the_first_that_is_asked_for():
    segment = translate(completion())
    assert segment.token_ids.tolist() == [7, 8, 9]
    assert segment.logprobs.tolist() == [-0.5, -1.0, -2.0]
    assert segment.routed_experts is not None
    assert segment.routed_experts.first_position == 2
    assert segment.routed_experts.end_position == 5 + 3 - 1
    assert segment.routed_experts.experts.tolist() == (np.arange(20).reshape(5, 2, 2) % 8).tolist()
    assert (segment.stop_reason, segment.weights.version, segment.replica) == (StopReason.STOP, 3, "replica-0")


def test_an_abort_before_the_first_token_has_no_rows():
    segment = translate(completion(token_ids=[], logprobs=None, routed_experts=None, finish_reason="abort"))
    assert (len(segment), segment.routed_experts, segment.stop_reason) == (0, None, StopReason.ABORT)


def test_without_capture_there_are_no_rows():
    assert translate(completion(routed_experts=None), routing=None).routed_experts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": "repetition"}, "finish_reason is 'repetition'; known are stop, length, abort, error"),
        ({"logprobs": None}, "logprobs are not of its 3 sampled tokens: None entries"),
        ({"logprobs": SimpleNamespace(token_ids=[7, 8, 1], logprobs=[-1.0] * 3)}, "logprobs are not of its 3"),
        ({"logprobs": SimpleNamespace(token_ids=[7, 8, 9], logprobs=[-1.0, 0.5, -1.0])}, r"logprobs\[1\] is 0.5"),
        ({"routed_experts": None}, "routed_experts has shape None; need \\[5, 4, 2\\]"),
        ({"routed_experts": np.zeros((4, 4, 2), np.uint8)}, "routed_experts has shape \\[4, 4, 2\\]; need \\[5"),
        ({"routed_experts": np.zeros((5, 4, 2), np.uint8)}, "duplicate expert at position 2"),
        ({"routed_experts": np.tile(np.array([3, 9], np.uint8), (5, 4, 1))}, "expert id 9; the model has 8"),
        ({"token_ids": [7, 8, 60], "logprobs": SimpleNamespace(token_ids=[7, 8, 60], logprobs=[-1.0] * 3)}, "id 60"),
    ],
)
def test_a_malformed_answer_names_the_field(changes: dict[str, Any], message: str):
    with pytest.raises(ContractError, match=message):
        translate(completion(**changes))


def test_one_request_has_one_completion():
    with pytest.raises(ContractError, match="2 completions"):
        translate(completion(), completion())
