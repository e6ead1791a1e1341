"""From a request to /generate and from its answer to segments: nothing malformed passes. Needs no engine."""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.engine import GenerateRequest, SamplingConfig
from async_rl.inference.checks import weight_label
from async_rl.inference.sglang.config import MAX_KEPT
from async_rl.inference.sglang.segment import check_generate, generate_body, to_segments
from async_rl.weights.model_info import ModelInfo
from message_queue.tokens import ContractError, RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from tests.helpers.groups import sets_of

ROUTING = RoutingSpec(layers=(1, 3), num_experts=8, top_k=2)
INFO = ModelInfo(family="glm4_moe", vocab_size=50, num_layers=4, context_length=100, routing=ROUTING)
TOKENS = np.arange(5, dtype=np.int32)
OLD, NEW = WeightVersion(3, "d"), WeightVersion(4, "e")
EXPERTS = np.arange(20).reshape(5, 2, 2) % 8


def encoded(experts: Any, *, dtype: Any = "<i4") -> str:
    return base64.b64encode(np.ascontiguousarray(experts, dtype=dtype).tobytes()).decode()


def all_layers(experts: Any) -> Any:
    """As SGLang sends them: dense layers are zeros."""
    rows = np.zeros((len(experts), 4, 2), np.int32)
    rows[:, [1, 3]] = experts
    return rows


def answer(**changes: Any) -> dict[str, Any]:
    """Three tokens after five, with rows from position 2 on; a change of None leaves the field out."""
    tokens = changes.pop("output_ids", [7, 8, 9])
    meta = {
        "finish_reason": {"type": "stop", "matched": 9},
        "output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None], [-2.0, 9, None]],
        "routed_experts": encoded(all_layers(EXPERTS)),
        "weight_versions": [{"version": "3:d", "start": 0, "end": 3}],
    }
    meta = {k: v for k, v in {**meta, **changes}.items() if v is not None}
    return {"output_ids": tokens, "meta_info": meta}


def translate(
    given: Any, *, routing: RoutingSpec | None = ROUTING, existing_rows: int = 2, **fields: Any
) -> list[TokenOutput]:
    fields = {"request_id": "a", "token_ids": TOKENS, "max_new_tokens": 9, "existing_rows": existing_rows, **fields}
    return to_segments(
        given,
        request=GenerateRequest(**fields),
        info=INFO,
        routing=routing,
        weights=NEW,
        loaded={weight_label(w): w for w in (OLD, NEW)},
        replica="replica-0",
    )


def test_rows_are_those_of_the_moe_layers_from_the_first_that_is_asked_for():
    [segment] = translate(answer())
    assert segment.token_ids.tolist() == [7, 8, 9]
    assert segment.logprobs.tolist() == [-0.5, -1.0, -2.0]
    assert segment.routed_experts is not None
    assert (segment.routed_experts.first_position, segment.routed_experts.end_position) == (2, 7)
    assert segment.routed_experts.experts.tolist() == EXPERTS.tolist()
    assert segment.routed_experts.experts.dtype == np.uint8
    assert (segment.stop_reason, segment.weights, segment.replica) == (StopReason.STOP, OLD, "replica-0")


def test_new_weights_in_flight_begin_a_segment():
    spans = [{"version": "3:d", "start": 0, "end": 2}, {"version": "4:e", "start": 2, "end": 3}]
    before, after = translate(answer(weight_versions=spans))
    assert (before.weights, len(before), before.stop_reason) == (OLD, 2, StopReason.ABORT)
    assert (after.weights, len(after), after.stop_reason) == (NEW, 1, StopReason.STOP)
    assert before.routed_experts is not None
    assert after.routed_experts is not None
    assert before.routed_experts.end_position == after.routed_experts.first_position == 6


def test_an_abort_before_the_first_token_has_no_rows():
    [segment] = translate({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "queue"}}})
    assert (len(segment), segment.routed_experts, segment.stop_reason) == (0, None, StopReason.ABORT)
    assert segment.weights == NEW


def test_without_capture_there_are_no_rows():
    [segment] = translate(answer(routed_experts=None), routing=None)
    assert segment.routed_experts is None


def test_more_than_256_experts_are_two_bytes_wide():
    routing = RoutingSpec(layers=(1, 3), num_experts=300, top_k=2)
    [segment] = translate(answer(routed_experts=encoded(all_layers(EXPERTS + 290))), routing=routing)
    assert segment.routed_experts is not None
    assert segment.routed_experts.experts.dtype == np.uint16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": {"type": "eviction"}}, "finish_reason is 'eviction'; known are stop, length, abort"),
        ({"finish_reason": None}, "finish_reason is None; need a dict"),
        ({"finish_reason": {"type": "length"}}, "finish_reason is 'length' after 3 tokens; the request is for 9"),
        ({"output_ids": []}, "output_ids is empty with finish_reason 'stop'"),
        ({"output_ids": None}, "output_ids is None; need a list"),
        ({"output_ids": [7, 8, 60]}, r"output_ids spans 7..60; the vocabulary has 50"),
        ({"output_ids": [7, 8, -1]}, r"output_ids spans -1..8"),
        ({"output_ids": [7, 8, 2**70]}, "output_ids are no int64 numbers"),
        ({"output_ids": [7, 8, "x"]}, "output_ids are no int64 numbers"),
        ({"output_ids": [[7, 8, 9]]}, "output_ids has shape"),
        ({"output_ids": list(range(10))}, "output_ids has 10 tokens; the request is for 9"),
        ({"output_token_logprobs": None}, "output_token_logprobs is None; need a list"),
        ({"output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None]]}, "not of its 3 sampled tokens: 2 entries"),
        ({"output_token_logprobs": [[-0.5, 7], [-1.0, 8], [-2.0, 1]]}, "not of its 3 sampled tokens"),
        ({"output_token_logprobs": [[-0.5, 7], [-1.0, 8], None]}, "not of its 3 sampled tokens"),
        ({"output_token_logprobs": [[-0.5, 7], [float("nan"), 8], [-2.0, 9]]}, r"logprobs\[1\] is nan"),
        ({"output_token_logprobs": [[-0.5, 7], [None, 8], [-2.0, 9]]}, r"logprobs\[1\] is nan"),
        ({"output_token_logprobs": [[-0.5, 7], [0.5, 8], [-2.0, 9]]}, r"logprobs\[1\] is 0.5"),
        ({"routed_experts": None}, "routed_experts is None; need a str"),
        ({"routed_experts": "!"}, "routed_experts is not base64 of int32"),
        ({"routed_experts": encoded([1, 2, 3], dtype=np.uint8)}, "routed_experts is not base64 of int32"),
        ({"routed_experts": encoded(all_layers(EXPERTS[:4]))}, r"has 32 ids; need 40 for \[5, 4, 2\]"),
        ({"routed_experts": encoded(np.tile(EXPERTS, (1, 1, 2)))}, r"experts in the dense layers \[0, 2\]"),
        ({"routed_experts": encoded(EXPERTS)}, r"has 20 ids; need 40 for \[5, 4, 2\]"),
        ({"routed_experts": encoded(np.zeros((5, 4, 2)))}, "duplicate expert at position 2"),
        ({"routed_experts": encoded(all_layers(np.tile([3, 9], (5, 2, 1))))}, r"expert ids 3..9; the model has 8"),
        ({"routed_experts": encoded(all_layers(np.tile([3, -1], (5, 2, 1))))}, r"expert ids -1..3; the model has 8"),
        ({"routed_experts": encoded(all_layers(np.tile([3, 256 + 5], (5, 2, 1))))}, r"expert ids 3..261"),
        ({"weight_versions": None}, "weight_versions is None; need a list"),
        ({"weight_versions": [{"version": "unknown", "start": 0, "end": 3}]}, "'unknown'; loaded were 3:d, 4:e"),
        ({"weight_versions": [{"version": "3:d", "start": 0, "end": 2}]}, "weight_versions covers 2 tokens; 3"),
        ({"weight_versions": [{"version": "3:d", "start": 1, "end": 3}]}, r"a span 1..3 after 0 tokens"),
        ({"weight_versions": [{"version": "3:d", "start": 0, "end": 0}]}, r"a span 0..0 after 0 tokens"),
        ({"weight_versions": ["3:d"]}, "the engine's version is None; need a str"),
    ],
)
def test_a_malformed_answer_names_the_field(changes: dict[str, Any], message: str):
    with pytest.raises(ContractError, match=message):
        translate(answer(**changes))


@pytest.mark.parametrize("whole", [None, [], "text", {"output_ids": [7]}, {"meta_info": 3, "output_ids": [7]}])
def test_an_answer_that_is_none_names_what_it_lacks(whole: Any):
    with pytest.raises(ContractError, match="meta_info is"):
        translate(whole)


def test_rows_that_were_forced_must_be_the_forced_ones():
    rows = np.zeros((5, 2, 2), np.uint8)
    rows[2:] = EXPERTS[:3, :, ::-1]  # positions 2..4 in another order
    rows[:2, :, 1] = 1
    translate(answer(), forced_experts=RoutedExperts(first_position=0, experts=rows))
    rows[3, 0] = [6, 7]
    with pytest.raises(ContractError, match=r"at position 3 are .*; forced were"):
        translate(answer(), forced_experts=RoutedExperts(first_position=0, experts=rows))


def test_logprobs_of_a_cut_distribution_are_the_renormalized_ones():
    cut = SamplingConfig(top_p=0.5)
    kept = [[token, 49] for token in answer()["output_ids"]]
    given = answer(output_token_sampling_logprobs=[-0.1, 1e-9, -0.3], output_token_sampling_mask=kept)
    [segment] = translate(given, sampling=cut)
    assert segment.logprobs.tolist() == pytest.approx([-0.1, 0, -0.3])
    assert sets_of(segment.support) == kept
    with pytest.raises(ContractError, match="output_token_sampling_logprobs has 1 entries for 3"):
        translate(answer(output_token_sampling_logprobs=[-0.1], output_token_sampling_mask=kept), sampling=cut)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: None,
        lambda kept: kept[:2],
        lambda kept: [*kept[:2], []],
        lambda kept: [*kept[:2], [48, 49]],
        lambda kept: [*kept[:2], [*kept[2], 50]],
        lambda kept: [*kept[:2], kept[2] * 2],
        lambda kept: [*kept[:2], 7],
        lambda kept: [*kept[:2], ["a"]],
    ],
    ids=["none", "too few", "empty", "without the token", "outside the vocabulary", "twice", "no list", "no ids"],
)
def test_kept_tokens_that_a_token_cannot_come_from_are_refused(spoil: Any):
    kept = spoil([[token, 49] for token in answer()["output_ids"]])
    given = answer(output_token_sampling_logprobs=[-0.1, -0.2, -0.3], output_token_sampling_mask=kept)
    with pytest.raises(ContractError, match=r"[sS]upport|sampling_mask"):
        translate(given, sampling=SamplingConfig(top_p=0.5))


@given(st.integers(0, 4), st.integers(1, 9), st.data())
def test_any_split_into_versions_gives_every_token_and_row_once(held: int, count: int, data: Any):
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=4))) if count > 1 else []
    bounds = [0, *cuts, count]
    spans = [
        {"version": ("3:d", "4:e")[i % 2], "start": start, "end": end}
        for i, (start, end) in enumerate(itertools.pairwise(bounds))
    ]
    rows = np.arange((5 + count - 1 - held) * 4).reshape(-1, 2, 2) % 8
    segments = translate(
        answer(
            output_ids=list(range(count)),
            output_token_logprobs=[[-1.0, i, None] for i in range(count)],
            routed_experts=encoded(all_layers(rows)),
            weight_versions=spans,
        ),
        existing_rows=held,
    )
    assert np.concatenate([s.token_ids for s in segments]).tolist() == list(range(count))
    parts = [s.routed_experts for s in segments if s.routed_experts is not None]
    assert np.concatenate([p.experts for p in parts]).tolist() == rows.tolist()
    assert [p.first_position for p in parts] == [held, *(p.end_position for p in parts[:-1])]
    assert [len(s) for s in segments] == [span["end"] - span["start"] for span in spans]


# ---- requests


def body(**fields: Any) -> dict[str, Any]:
    fields = {"request_id": "a#0.", "token_ids": TOKENS, "max_new_tokens": 9, "existing_rows": 2, **fields}
    made = generate_body(GenerateRequest(**fields), info=INFO, routing=ROUTING)
    json.dumps(made)
    return made


def test_a_request_asks_for_the_rows_it_lacks_and_only_those():
    made = body(stop_token_ids=(3,), cache_salt="v7", sampling=SamplingConfig(temperature=0.5))
    assert (made["rid"], made["input_ids"], made["extra_key"]) == ("a#0.", [0, 1, 2, 3, 4], "v7")
    assert (made["return_routed_experts"], made["routed_experts_start_len"]) == (True, 2)
    assert "return_sampling_mask" not in made
    params = {"max_new_tokens": 9, "temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop_token_ids": [3]}
    assert made["sampling_params"] == params


@pytest.mark.parametrize(
    ("cut", "top_k"),
    [({"top_p": 0.9}, MAX_KEPT), ({"min_p": 0.1}, MAX_KEPT), ({"top_k": 7}, 7), ({"top_k": 99}, MAX_KEPT)],
)
def test_a_cut_distribution_is_asked_for_with_its_renormalized_logprobs(cut: Any, top_k: int):
    made = body(sampling=SamplingConfig(**cut))
    assert made["return_sampling_mask"]
    assert made["sampling_params"]["top_k"] == top_k


def test_forced_rows_travel_with_the_request_and_part_its_cache():
    forced = RoutedExperts(first_position=0, experts=np.ascontiguousarray(EXPERTS[:3], np.uint8))
    made = body(forced_experts=forced, session="s", cache_salt="v7")
    assert made["extra_key"] == "v7|forced|s"
    sent = made["sampling_params"]["custom_params"]["async_rl_forced"]
    assert base64.b64decode(sent["rows"]) == EXPERTS[:3].astype(np.uint8).tobytes()
    assert {k: v for k, v in sent.items() if k != "rows"} == {
        "start": 0,
        "dtype": "uint8",
        "shape": [3, 2, 2],
        "layers": [1, 3],
        "num_layers": 4,
    }


ROWS = RoutedExperts(first_position=0, experts=np.ascontiguousarray(EXPERTS, np.uint8))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"token_ids": TOKENS[:0]}, "token_ids is empty"),
        ({"token_ids": TOKENS + 46}, r"token_ids spans 46..50; the vocabulary has 50"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 60}, "5 tokens and max_new_tokens=60; together more than engine.max_model_len=64"),
        ({"existing_rows": 5}, "existing_rows is 5 for 5 tokens"),
        ({"forced_experts": ROWS}, r"forced_experts has rows 0..4 \(0 unavailable\) for 5 tokens"),
    ],
)
def test_a_request_that_cannot_be_served_names_field_and_value(fields: dict[str, Any], message: str):
    fields = {"request_id": "a#0.", "token_ids": TOKENS, "max_new_tokens": 9, **fields}
    with pytest.raises(ContractError, match=message):
        check_generate(GenerateRequest(**fields), info=INFO, routing=ROUTING, max_model_len=64)


def test_a_cut_over_too_many_tokens_is_refused_before_it_is_sent():
    info = ModelInfo(family="qwen3_moe", vocab_size=150_000, num_layers=4, context_length=100, routing=ROUTING)

    def check(**cut: Any) -> None:
        ask = GenerateRequest(request_id="a", token_ids=TOKENS, max_new_tokens=9, sampling=SamplingConfig(**cut))
        check_generate(ask, info=info, routing=ROUTING, max_model_len=64)

    with pytest.raises(ContractError, match=rf"top_k is {MAX_KEPT}"):
        check(top_k=MAX_KEPT)
    check(top_k=MAX_KEPT - 1)
    check(top_k=150_000)
    check(top_p=0.9)
