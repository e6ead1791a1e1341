"""From a request to vLLM and SGLang, and from an answer to segments: malformed ones are refused. Needs no engine."""

import base64
import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent_loop.engine import GenerateRequest, SamplingConfig
from async_rl.inference.checks import check_request, weight_label
from async_rl.inference.sglang import segment as sglang
from async_rl.inference.sglang.config import MAX_KEPT
from async_rl.inference.vllm import segment as vllm
from async_rl.weights.model_info import ModelInfo
from message_queue.errors import ContractError
from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, WeightVersion
from tests.helpers.groups import sets_of

ROUTING = RoutingSpec(layers=(1, 3), num_experts=8, top_k=2)
INFO = ModelInfo(family="glm4_moe", vocab_size=50, num_layers=4, context_length=100, routing=ROUTING)
TOKENS = np.arange(5, dtype=np.int32)
OLD, NEW = WeightVersion(3, "d"), WeightVersion(4, "e")
EXPERTS = np.arange(20).reshape(5, 2, 2) % 8
ENGINES = pytest.mark.parametrize("engine", ["vllm", "sglang"])


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer before its encoding: three tokens after five, with rows from position 2 on."""

    token_ids: Any = (7, 8, 9)
    logprobs: Any = (-0.5, -1.0, -2.0)
    scored: Any = (7, 8, 9)
    """Tokens that the logprobs are of."""
    experts: Any = field(default_factory=lambda: EXPERTS)
    """[rows, MoE layers, top_k], or None."""
    spans: Any = ((weight_label(OLD), 0, 3),)
    reason: str = "stop"
    kept: Any = None
    """Kept tokens of each sampled one."""

    def all_layers(self):
        """As engines send them: dense layers are zeros."""
        rows = np.zeros((len(self.experts), 4, self.experts.shape[-1]), np.int32)
        rows[:, [1, 3]] = self.experts
        return rows

    def for_vllm(self):
        spans = [SimpleNamespace(version=v, start=start, end=end) for v, start, end in self.spans or ()]
        completion = SimpleNamespace(
            token_ids=list(self.token_ids),
            logprobs=SimpleNamespace(token_ids=list(self.scored), logprobs=list(self.logprobs)),
            routed_experts=None if self.experts is None else self.all_layers(),
            finish_reason=self.reason,
            weight_versions=spans,
            sampling_mask=None if self.kept is None else SimpleNamespace(token_ids=self.kept),
        )
        return SimpleNamespace(outputs=[completion])

    def for_sglang(self):
        meta = {
            "finish_reason": {"type": self.reason},
            "output_token_logprobs": [[p, token, None] for p, token in zip(self.logprobs, self.scored, strict=False)],
            "output_token_sampling_logprobs": list(self.logprobs),
        }
        if self.experts is not None:
            meta["routed_experts"] = encoded(self.all_layers())
        if self.spans is not None:
            meta["weight_versions"] = [{"version": v, "start": start, "end": end} for v, start, end in self.spans]
        if self.kept is not None:
            meta["output_token_sampling_mask"] = self.kept
        return {"output_ids": list(self.token_ids), "meta_info": meta}


def encoded(experts, *, dtype="<i4"):
    return base64.b64encode(np.ascontiguousarray(experts, dtype=dtype).tobytes()).decode()


ABORTED = Answer(token_ids=(), logprobs=(), scored=(), experts=None, spans=(), reason="abort")


def request_of(**fields):
    good = {"request_id": "a#0.", "token_ids": TOKENS, "max_new_tokens": 9, "existing_rows": 2}
    return GenerateRequest(**(good | fields))


def translate(engine, answer, *, raw=None, routing=ROUTING, **fields):
    """raw: the encoded answer, if it is another one."""
    module, given = (vllm, answer.for_vllm()) if engine == "vllm" else (sglang, answer.for_sglang())
    return module.to_segments(
        given if raw is None else raw,
        request=request_of(**fields),
        info=INFO,
        routing=routing,
        weights=NEW,
        loaded={weight_label(w): w for w in (OLD, NEW)},
        replica="replica-0",
    )


@ENGINES
def test_rows_are_those_of_the_moe_layers_from_the_first_missing_position(engine):
    [segment] = translate(engine, Answer())
    assert segment.token_ids.tolist() == [7, 8, 9]
    assert segment.logprobs.tolist() == [-0.5, -1.0, -2.0]
    assert (segment.routed_experts.first_position, segment.routed_experts.end_position) == (2, 7)
    assert segment.routed_experts.experts.tolist() == EXPERTS.tolist()
    assert segment.routed_experts.experts.dtype == np.uint8
    assert (segment.stop_reason, segment.weights, segment.replica) == (StopReason.STOP, OLD, "replica-0")
    first, second = translate(engine, Answer(spans=((weight_label(OLD), 0, 1), (weight_label(NEW), 1, 3))))
    assert (len(first), first.weights, first.stop_reason) == (1, OLD, StopReason.ABORT)
    assert (len(second), second.weights, second.stop_reason) == (2, NEW, StopReason.STOP)
    [segment] = translate(engine, Answer(experts=None), routing=None)
    assert segment.routed_experts is None


@ENGINES
def test_an_abort_before_the_first_token_has_no_rows_and_no_sets(engine):
    [segment] = translate(engine, ABORTED)
    assert (len(segment), segment.routed_experts, segment.stop_reason) == (0, None, StopReason.ABORT)
    assert segment.weights == NEW
    [segment] = translate(engine, ABORTED, sampling=SamplingConfig(top_p=0.5))
    assert sets_of(segment.support) == []


def test_more_than_256_experts_are_two_bytes_wide():
    routing = RoutingSpec(layers=(1, 3), num_experts=300, top_k=2)
    [segment] = translate("sglang", Answer(experts=EXPERTS + 290), routing=routing)
    assert segment.routed_experts.experts.dtype == np.uint16


NAN = float("nan")
MALFORMED = [
    ("finish_reason", {"reason": "eviction"}),
    ("_ids", {"token_ids": (7, 8, 60), "scored": (7, 8, 60)}),
    ("_ids", {"token_ids": (7, 8, -1), "scored": (7, 8, -1)}),
    ("_ids", {"token_ids": (7, 8, 1 << 40), "scored": (7, 8, 1 << 40)}),
    ("_ids", {"token_ids": (7, 8, 2**70)}),
    ("_ids", {"token_ids": (7, 8, "x")}),
    ("_ids", {"token_ids": ((7, 8, 9),)}),
    ("_ids", {"token_ids": range(10)}),
    ("logprobs", {"scored": (7, 8, 1)}),
    ("logprobs", {"scored": (7, 8), "logprobs": (-0.5, -1.0)}),
    *(("logprobs", {"logprobs": (-0.5, value, -1.0)}) for value in (NAN, float("-inf"), 0.5, None, "x")),
    ("routed_experts", {"experts": None}),
    ("routed_experts", {"experts": EXPERTS[1:]}),
    ("routed_experts", {"experts": np.concatenate([EXPERTS, EXPERTS[:1]])}),
    ("routed_experts", {"experts": EXPERTS[..., :1]}),
    *(("expert", {"experts": np.tile([3, value], (5, 2, 1))}) for value in (3, 9, -1, 256 + 5)),
    ("weight.versions", {"spans": None}),
    ("weight.versions", {"spans": (("9:x", 0, 3),)}),
    ("weight.versions", {"spans": (("3:d", 0, 2),)}),
    ("weight.versions", {"spans": (("3:d", 1, 3),)}),
    ("weight.versions", {"spans": (("3:d", 0, 1), ("4:e", 2, 3))}),
    ("weight.versions", {"spans": (("3:d", 0, 3), ("4:e", 3, 3))}),
]


@ENGINES
@pytest.mark.parametrize(("field", "changes"), MALFORMED)
def test_a_malformed_answer_names_the_field(engine, field, changes):
    with pytest.raises(ContractError, match=field):
        translate(engine, replace(Answer(), **changes))


def sglang_answer(**meta):
    """A good answer but for `meta`."""
    answer = Answer().for_sglang()
    return {**answer, "meta_info": {**answer["meta_info"], **meta}}


@pytest.mark.parametrize(
    ("field", "answer"),
    [
        ("finish_reason", sglang_answer(finish_reason=None)),
        ("finish_reason", sglang_answer(finish_reason={"type": "length"})),  # after 3 tokens; the request is for 9
        ("output_token_logprobs", sglang_answer(output_token_logprobs=None)),
        ("output_token_logprobs", sglang_answer(output_token_logprobs=[[-0.5, 7], [-1.0, 8], None])),
        ("routed_experts", sglang_answer(routed_experts="!")),
        ("routed_experts", sglang_answer(routed_experts=encoded([1, 2, 3], dtype=np.uint8))),
        ("routed_experts", sglang_answer(routed_experts=encoded(EXPERTS))),
        ("dense layers", sglang_answer(routed_experts=encoded(np.tile(EXPERTS, (1, 1, 2))))),
        ("version", sglang_answer(weight_versions=["3:d"])),
        *(("meta_info", whole) for whole in ([], "text", {"output_ids": [7]}, {"meta_info": 3, "output_ids": [7]})),
        *(("output_ids", {**sglang_answer(), "output_ids": output_ids}) for output_ids in (None, [])),
    ],
)
def test_a_malformed_sglang_answer_names_the_field(field, answer):
    with pytest.raises(ContractError, match=field):
        translate("sglang", Answer(), raw=answer)


def test_a_vllm_answer_has_one_completion_with_flat_logprobs_of_all_layers():
    [completion] = Answer().for_vllm().outputs
    with pytest.raises(ContractError, match="2 completions"):
        translate("vllm", Answer(), raw=SimpleNamespace(outputs=[completion, completion]))
    for name, value in (("logprobs", None), ("routed_experts", completion.routed_experts[:, :3])):
        spoiled = SimpleNamespace(**{**vars(completion), name: value})
        with pytest.raises(ContractError, match=name):
            translate("vllm", Answer(), raw=SimpleNamespace(outputs=[spoiled]))


@ENGINES
def test_forced_rows_that_come_back_otherwise_are_refused(engine):
    rows = np.zeros((5, 2, 2), np.uint8)
    rows[2:], rows[:2, :, 1] = EXPERTS[:3], 1
    translate(engine, Answer(), forced_experts=RoutedExperts(first_position=0, experts=rows[:4]))
    rows[3, 0] = rows[3, 0, ::-1]
    if engine == "sglang":  # SGLang returns them in another order
        translate(engine, Answer(), forced_experts=RoutedExperts(first_position=0, experts=rows[:4]))
        rows[3, 0] = [6, 7]
    with pytest.raises(ContractError, match="position 3"):
        translate(engine, Answer(), forced_experts=RoutedExperts(first_position=0, experts=rows[:4]))
    translate(engine, Answer(), forced_experts=RoutedExperts(first_position=0, experts=rows[:2]))  # not in the answer


@ENGINES
def test_kept_tokens_are_those_of_each_sampled_token(engine):
    answer = Answer(kept=[[7, 49, 3], [8], [9, 0]])
    [segment] = translate(engine, answer, sampling=SamplingConfig(top_k=3))
    assert sets_of(segment.support) == [[3, 7, 49], [8], [0, 9]]
    [segment] = translate(engine, answer)
    assert segment.support is None, "the request is not cut"


def test_sglang_logprobs_of_a_cut_distribution_are_the_renormalized_ones():
    raw = Answer(kept=[[7], [8], [9]]).for_sglang()
    raw["meta_info"]["output_token_sampling_logprobs"] = [-0.1, 1e-9, -0.3]
    [segment] = translate("sglang", Answer(), raw=raw, sampling=SamplingConfig(top_p=0.5))
    assert segment.logprobs.tolist() == pytest.approx([-0.1, 0, -0.3])
    raw["meta_info"]["output_token_sampling_logprobs"] = [-0.1]
    with pytest.raises(ContractError, match="output_token_sampling_logprobs"):
        translate("sglang", Answer(), raw=raw, sampling=SamplingConfig(top_p=0.5))


LAST_KEPT = {
    "empty": [],
    "without the token": [48, 49],
    "outside the vocabulary": [9, 49, 50],
    "twice": [9, 49, 9, 49],
    "no list": 7,
    "no ids": ["a"],
}


@ENGINES
@pytest.mark.parametrize("last", [None, "too few", *LAST_KEPT])
def test_kept_tokens_that_a_token_cannot_come_from_are_refused(engine, last):
    kept = [[7, 49], [8, 49], *([LAST_KEPT[last]] if last in LAST_KEPT else [])]
    with pytest.raises(ContractError, match=r"[sS]upport|sampling_mask"):
        translate(engine, Answer(kept=None if last is None else kept), sampling=SamplingConfig(top_p=0.5))


# ---- requests


def forced(count, *, first_position=0):
    experts = np.tile(np.array([[1, 2], [5, 4]], np.uint8), (count, 1, 1))
    return RoutedExperts(first_position=first_position, experts=experts)


@pytest.mark.parametrize(
    ("field", "fields", "routing"),
    [
        ("request_id", {"request_id": ""}, ROUTING),
        ("token_ids", {"token_ids": TOKENS[:0]}, ROUTING),
        ("token_ids", {"token_ids": TOKENS + 46}, ROUTING),
        ("max_new_tokens", {"max_new_tokens": 0}, ROUTING),
        ("existing_rows", {"existing_rows": 5}, ROUTING),
        ("forced_experts", {"forced_experts": forced(3)}, None),
        ("forced_experts", {"forced_experts": forced(5)}, ROUTING),
        ("shape", {"forced_experts": RoutedExperts(first_position=0, experts=np.zeros((1, 3, 1), np.uint8))}, ROUTING),
    ],
)
def test_a_request_that_cannot_be_served_names_the_field(field, fields, routing):
    check_request(request_of(forced_experts=forced(4)), info=INFO, routing=ROUTING)
    with pytest.raises(ContractError, match=field):
        check_request(request_of(**fields), info=INFO, routing=routing)


def test_a_request_that_sglang_would_cut_short_names_the_field():
    wide = replace(INFO, vocab_size=150_000)

    def check(*, max_new_tokens=9, **cut):
        ask = request_of(max_new_tokens=max_new_tokens, sampling=SamplingConfig(**cut))
        sglang.check_generate(ask, info=wide, routing=ROUTING, max_model_len=64)

    with pytest.raises(ContractError, match="max_model_len"):
        check(max_new_tokens=60)
    with pytest.raises(ContractError, match="top_k"):
        check(top_k=MAX_KEPT)
    for cut in ({"top_k": MAX_KEPT - 1}, {"top_k": 150_000}, {"top_p": 0.9}):
        check(**cut)


def body(**fields):
    made = sglang.generate_body(request_of(**fields), info=INFO, routing=ROUTING)
    json.dumps(made)
    return made


def test_a_request_to_sglang_asks_for_missing_rows_only():
    made = body(stop_token_ids=(3,), cache_salt="v7", sampling=SamplingConfig(temperature=0.5))
    assert (made["input_ids"], made["extra_key"]) == ([0, 1, 2, 3, 4], "v7")
    assert (made["return_routed_experts"], made["routed_experts_start_len"]) == (True, 2)
    assert "return_sampling_mask" not in made
    params = {"max_new_tokens": 9, "temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop_token_ids": [3]}
    assert made["sampling_params"] == params


@pytest.mark.parametrize(
    ("cut", "of_vllm", "of_sglang"),
    [
        ({}, -1, -1),
        ({"top_p": 0.5}, 50, MAX_KEPT),
        ({"min_p": 0.1}, 50, MAX_KEPT),
        ({"top_k": 7}, 7, 7),
        ({"top_p": 0.5, "temperature": 0.0}, -1, -1),
    ],
)
def test_an_engine_gets_a_top_k_if_and_only_if_a_request_is_cut(cut, of_vllm, of_sglang):
    sampling = SamplingConfig(**cut)
    assert vllm._top_k(request_of(sampling=sampling), INFO) == of_vllm
    made = body(sampling=sampling)
    assert made["sampling_params"]["top_k"] == of_sglang
    assert made.get("return_sampling_mask", False) == (of_sglang > 0)


def test_a_forced_request_shares_its_prefix_cache_with_its_session_alone():
    def salts(session, request_id, rows):
        fields = {"request_id": request_id, "session": session, "cache_salt": "group", "forced_experts": rows}
        ask = request_of(**fields)
        return vllm.cache_salt(ask, forced=[] if rows is None else [rows]), body(**fields)["extra_key"]

    assert salts("s", "a", None) == ("group", "group")
    apart = {salts(*who, forced(2)) for who in (("s", "a"), ("t", "a"), ("", "a"), ("", "b"))}
    assert len(apart | {("group", "group")}) == 5
    assert salts("s", "a", forced(2)) == salts("s", "b", forced(4)), "turns of one session do"


def test_a_request_to_sglang_without_rows_to_force_is_free():
    assert "custom_params" in body(forced_experts=forced(2))["sampling_params"]
    assert body(forced_experts=forced(0)) == body()


def test_forced_rows_travel_as_bytes_in_the_narrowest_type():
    assert vllm.forced_args([], ROUTING) is None
    args = vllm.forced_args([forced(2), forced(1, first_position=3)], ROUTING)
    (blocks,) = args.values()
    assert [(b["start"], b["shape"], b["dtype"], len(b["rows"])) for b in blocks] == [
        (0, [2, 2, 2], "uint8", 8),
        (3, [1, 2, 2], "uint8", 4),
    ]
    sent = body(forced_experts=forced(2))["sampling_params"]["custom_params"][sglang.FORCED]
    assert base64.b64decode(sent.pop("rows")) == forced(2).experts.tobytes()
    assert sent == {"start": 0, "dtype": "uint8", "shape": [2, 2, 2], "layers": [1, 3], "num_layers": 4}


def test_vllm_rows_recorded_so_far_have_their_positions():
    def state(chunks, sampled):
        rows = [np.arange(n * 8, dtype=np.uint8).reshape(n, 4, 2) % 8 for n in chunks]
        detokenizer = SimpleNamespace(num_output_tokens=lambda: sampled)
        return SimpleNamespace(routed_experts_chunks=rows, prompt_len=5, detokenizer=detokenizer)

    states = {"waiting": state([], 0), "whole": state([5, 1], 2), "delta": state([2, 1, 1], 3)}
    engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    found = vllm.recorded_rows(engine, ROUTING)
    assert {name: (rows["start"], rows["shape"]) for name, rows in found.items()} == {
        "whole": (0, [6, 2, 2]),
        "delta": (3, [4, 2, 2]),
    }
