"""From vLLM's output to a segment: nothing malformed passes. Needs no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent_loop.engine import GenerateRequest, SamplingConfig
from async_rl.inference.checks import check_request, weight_label
from async_rl.inference.vllm.segment import (
    _top_k,
    cache_salt,
    forced_args,
    recorded_rows,
    to_segments,
)
from async_rl.weights.model_info import ModelInfo
from message_queue.tokens import ContractError, RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from tests.helpers.groups import sets_of

ROUTING = RoutingSpec(layers=(1, 3), num_experts=8, top_k=2)
OLD, NEW = WeightVersion(3, "c"), WeightVersion(4, "d")
INFO = ModelInfo(family="qwen3_moe", vocab_size=50, num_layers=4, context_length=100, routing=ROUTING)
TOKENS = np.arange(5, dtype=np.int32)


def spans(*parts: tuple[WeightVersion, int, int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(version=weight_label(w), start=start, end=end) for w, start, end in parts]


def completion(**changes: Any) -> SimpleNamespace:
    """Three tokens after five, with rows from position 2 on."""
    experts = np.zeros((5, 4, 2), np.uint8)
    experts[:, [1, 3]] = np.arange(20).reshape(5, 2, 2) % 8
    good = {
        "token_ids": [7, 8, 9],
        "logprobs": SimpleNamespace(token_ids=[7, 8, 9], logprobs=[-0.5, -1.0, -2.0]),
        "routed_experts": experts,
        "finish_reason": "stop",
        "weight_versions": spans((NEW, 0, 3)),
    }
    return SimpleNamespace(**{**good, **changes})


def request_of(**fields: Any) -> GenerateRequest:
    return GenerateRequest(
        **{"request_id": "a", "token_ids": TOKENS, "max_new_tokens": 9, "existing_rows": 2, **fields},  # pyright: ignore[reportArgumentType]
    )


def translate_all(*completions: Any, routing: RoutingSpec | None = ROUTING, **request: Any) -> list[TokenOutput]:
    return to_segments(
        SimpleNamespace(outputs=list(completions)),  # pyright: ignore[reportArgumentType]
        request=request_of(**request),
        info=INFO,
        routing=routing,
        weights=NEW,
        loaded={weight_label(w): w for w in (OLD, NEW)},
        replica="replica-0",
    )


def translate(*completions: Any, **context: Any) -> TokenOutput:
    [segment] = translate_all(*completions, **context)
    return segment


def test_rows_are_those_of_the_moe_layers_from_the_first_that_is_asked_for():
    segment = translate(completion())
    assert segment.token_ids.tolist() == [7, 8, 9]
    assert segment.logprobs.tolist() == [-0.5, -1.0, -2.0]
    assert segment.routed_experts is not None
    assert segment.routed_experts.first_position == 2
    assert segment.routed_experts.end_position == 5 + 3 - 1
    assert segment.routed_experts.experts.tolist() == (np.arange(20).reshape(5, 2, 2) % 8).tolist()
    assert (segment.stop_reason, segment.weights, segment.replica) == (StopReason.STOP, NEW, "replica-0")


def test_an_abort_before_the_first_token_has_no_rows():
    aborted = completion(token_ids=[], logprobs=None, routed_experts=None, finish_reason="abort", weight_versions=[])
    segment = translate(aborted)
    assert (len(segment), segment.routed_experts, segment.stop_reason) == (0, None, StopReason.ABORT)
    assert segment.weights == NEW


def test_an_update_in_flight_makes_two_segments_cut_at_the_token():
    first, second = translate_all(completion(weight_versions=spans((OLD, 0, 1), (NEW, 1, 3))))
    assert (first.weights, second.weights) == (OLD, NEW)
    assert (first.stop_reason, second.stop_reason) == (StopReason.ABORT, StopReason.STOP)
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([7], [8, 9])
    assert first.routed_experts is not None
    assert second.routed_experts is not None
    assert [r.first_position for r in (first.routed_experts, second.routed_experts)] == [2, 5]
    assert [r.end_position for r in (first.routed_experts, second.routed_experts)] == [5, 7]


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
        ({"routed_experts": np.tile(np.array([3, 9], np.uint8), (5, 4, 1))}, "expert ids 3..9; the model has 8"),
        ({"token_ids": [7, 8, 60], "logprobs": SimpleNamespace(token_ids=[7, 8, 60], logprobs=[-1.0] * 3)}, "7..60"),
        ({"weight_versions": None}, r"weight versions cover \[\] tokens; 3 were sampled"),
        ({"weight_versions": spans((WeightVersion(9, "x"), 0, 3))}, "9:x.*need spans without gaps of 3:c, 4:d"),
        ({"weight_versions": spans((OLD, 0, 1), (NEW, 2, 3))}, "need spans without gaps"),
        ({"weight_versions": spans((OLD, 0, 3), (NEW, 3, 3))}, r"weight versions cover \[3, 0\] tokens"),
    ],
)
def test_a_malformed_answer_names_the_field(changes: dict[str, Any], message: str):
    with pytest.raises(ContractError, match=message):
        translate(completion(**changes))


KEPT = SimpleNamespace(token_ids=[[7, 49, 3], [8], [9, 0]])


def test_kept_tokens_are_those_of_each_sampled_token():
    segment = translate(completion(sampling_mask=KEPT), sampling=SamplingConfig(top_k=3))
    assert sets_of(segment.support) == [[3, 7, 49], [8], [0, 9]]
    assert translate(completion(sampling_mask=KEPT)).support is None, "the request is not cut"


def test_an_abort_before_the_first_token_of_a_cut_request():
    aborted = completion(
        token_ids=[], logprobs=None, routed_experts=None, finish_reason="abort", weight_versions=[], sampling_mask=None
    )
    assert sets_of(translate(aborted, sampling=SamplingConfig(top_p=0.5)).support) == []


@pytest.mark.parametrize(
    "mask",
    [None, SimpleNamespace(token_ids=[[7], [8]]), SimpleNamespace(token_ids=[[7], [], [9]])],
    ids=["none", "too few", "empty"],
)
def test_a_cut_answer_without_all_its_kept_tokens_is_refused(mask: Any):
    with pytest.raises(ContractError, match=r"sampling_mask|support"):
        translate(completion(sampling_mask=mask), sampling=SamplingConfig(min_p=0.5))


@pytest.mark.parametrize(
    ("sampling", "top_k"), [({}, -1), ({"top_p": 0.5}, 50), ({"top_k": 7}, 7), ({"top_p": 0.5, "temperature": 0.0}, -1)]
)
def test_vllm_is_given_a_top_k_if_and_only_if_a_request_is_cut(sampling: Any, top_k: int):
    assert _top_k(request_of(sampling=SamplingConfig(**sampling)), INFO) == top_k


def test_one_request_has_one_completion():
    with pytest.raises(ContractError, match="2 completions"):
        translate(completion(), completion())


def forced(count: int, *, first_position: int = 0) -> RoutedExperts:
    experts = np.tile(np.array([[1, 2], [5, 4]], np.uint8), (count, 1, 1))
    return RoutedExperts(first_position=first_position, experts=experts)


def test_forced_rows_that_come_back_otherwise_are_refused():
    rows = completion().routed_experts
    rows[:2, [1, 3]] = forced(4).experts[2:]
    segment = translate(completion(routed_experts=rows), forced_experts=forced(4))
    assert segment.routed_experts is not None
    rows[1, 3] = rows[1, 3, ::-1]
    with pytest.raises(
        ContractError, match=r"at position 3 are \[\[1, 2\], \[4, 5\]\]; forced were \[\[1, 2\], \[5, 4\]\]"
    ):
        translate(completion(routed_experts=rows), forced_experts=forced(4))
    translate(completion(), forced_experts=forced(2))  # rows before those that are asked for do not come back


@pytest.mark.parametrize(
    ("fields", "routing", "message"),
    [
        ({"token_ids": TOKENS[:0]}, ROUTING, "token_ids is empty"),
        ({"max_new_tokens": 0}, ROUTING, "max_new_tokens is 0"),
        ({"existing_rows": 5}, ROUTING, "existing_rows is 5 for 5 tokens"),
        ({"token_ids": TOKENS + 46}, ROUTING, r"token_ids spans 46\.\.50; the vocabulary has 50"),
        ({"forced_experts": forced(3)}, None, "forced_experts is set, but the replica captures no routing"),
        ({"forced_experts": forced(5)}, ROUTING, r"forced_experts has rows 0\.\.4 .* for 5 tokens"),
        (
            {"forced_experts": RoutedExperts(first_position=0, experts=np.zeros((1, 3, 1), np.uint8))},
            ROUTING,
            r"\[3, 1\]",
        ),
    ],
)
def test_a_request_that_cannot_be_served_names_the_field(
    fields: dict[str, Any], routing: RoutingSpec | None, message: str
):
    good = {"request_id": "a", "token_ids": TOKENS, "max_new_tokens": 9, "forced_experts": forced(4)}
    check_request(GenerateRequest(**good), info=INFO, routing=ROUTING)
    with pytest.raises(ContractError, match=message):
        check_request(GenerateRequest(**{**good, **fields}), info=INFO, routing=routing)


def test_a_forced_request_shares_no_prefix_cache_with_another_session():
    def salt(session: str, request_id: str, rows: list[RoutedExperts]) -> str:
        ask = GenerateRequest(
            request_id=request_id, token_ids=TOKENS, max_new_tokens=1, session=session, cache_salt="group"
        )
        return cache_salt(ask, forced=rows)

    assert salt("s", "a", []) == "group"
    salts = {salt(*who, [forced(2)]) for who in (("s", "a"), ("t", "a"), ("", "a"), ("", "b"))}
    assert len(salts | {"group"}) == 5
    assert salt("s", "a", [forced(2)]) == salt("s", "b", [forced(4)]), "turns of one session do"


def test_forced_rows_travel_as_bytes_in_the_narrowest_type():
    assert forced_args([], ROUTING) is None
    args = forced_args([forced(2), forced(1, first_position=3)], ROUTING)
    assert args is not None
    (blocks,) = args.values()
    assert [(b["start"], b["shape"], b["dtype"], len(b["rows"])) for b in blocks] == [
        (0, [2, 2, 2], "uint8", 8),
        (3, [1, 2, 2], "uint8", 4),
    ]


def test_rows_recorded_so_far_are_placed_where_they_belong():
    def state(chunks: list[int], sampled: int) -> SimpleNamespace:
        rows = [np.arange(n * 8, dtype=np.uint8).reshape(n, 4, 2) % 8 for n in chunks]
        detokenizer = SimpleNamespace(num_output_tokens=lambda: sampled)
        return SimpleNamespace(routed_experts_chunks=rows, prompt_len=5, detokenizer=detokenizer)

    states = {"waiting": state([], 0), "whole": state([5, 1], 2), "delta": state([2, 1, 1], 3)}
    engine: Any = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    found = recorded_rows(engine, ROUTING)
    assert {name: (rows["start"], rows["shape"]) for name, rows in found.items()} == {
        "whole": (0, [6, 2, 2]),
        "delta": (3, [4, 2, 2]),
    }
