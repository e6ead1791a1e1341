"""Forced experts get the weights the router would give them, by the formula that explains its own choice."""

import importlib
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from async_rl.inference.sglang.config import PLUGIN_PATH
from tests.helpers import numerics

pytestmark = pytest.mark.numerics

Chosen = namedtuple("Chosen", ["topk_weights", "topk_ids", "router_logits"])


@pytest.fixture
def forcing(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN_PATH))
    capturer = SimpleNamespace(get_global_experts_capturer=lambda: None)
    monkeypatch.setitem(sys.modules, "sglang.srt.state_capturer.routed_experts", capturer)
    return importlib.import_module("async_rl_sglang.forcing")


def applied(forcing, plan):
    return forcing.applied(SimpleNamespace(**{forcing.PLAN: plan}))


def chosen_by(scores, *, bias=0.0, renormalize, scale):
    ids = (scores + bias).topk(2, -1).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * scale


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_reweighed_reads_the_formula_from_the_answer_of_the_router(forcing, kind, renormalize, scale):
    torch.manual_seed(0)
    logits = torch.randn(6, 8)
    scores = logits.softmax(-1) if kind == "softmax" else logits.sigmoid()
    bias = torch.randn(8) if kind == "sigmoid" else 0.0
    ids, weights = chosen_by(scores, bias=bias, renormalize=renormalize, scale=scale)
    given = torch.randint(0, 4, (6, 1)) + torch.tensor([[0, 4]])
    expected = scores.gather(-1, given)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    found = forcing.reweighed(logits, ids, weights, given=given, renormalize=renormalize)
    # A softmax of 8 scores, a sum, a quotient and a product, one after the other.
    assert torch.allclose(found, expected * scale, rtol=numerics.rounding(16), atol=0)


def test_reweighed_refuses_a_router_that_no_formula_explains(forcing):
    logits = torch.randn(6, 8)
    ids = logits.topk(2, -1).indices
    with pytest.raises(RuntimeError, match=r"softmax.*sigmoid"):
        forcing.reweighed(logits, ids, torch.rand(6, 2), given=ids, renormalize=True)


def select(hidden, logits, config, *, layer_id):
    del hidden, config, layer_id
    ids, weights = chosen_by(logits.softmax(-1), renormalize=True, scale=1.0)
    return Chosen(weights, ids, logits)


def test_select_forced_forces_planned_tokens_and_layers_alone(forcing):
    logits = torch.randn(3, 8)
    plan = torch.full((3, 2, 2), -1, dtype=torch.int32)
    plan[1, 1] = torch.tensor([6, 0])
    config = SimpleNamespace(renormalize=True)
    free = select(None, logits, config, layer_id=0)
    with applied(forcing, plan):
        untouched = forcing.select_forced(select, None, logits, config, layer_id=0)
        forced = forcing.select_forced(select, None, logits, config, layer_id=1)
    assert untouched.topk_ids.equal(free.topk_ids)
    assert forced.topk_ids[1].tolist() == [6, 0]
    assert forced.topk_ids[[0, 2]].equal(free.topk_ids[[0, 2]])
    assert forced.topk_weights[[0, 2]].equal(free.topk_weights[[0, 2]])
    after = forcing.select_forced(select, None, logits, config, layer_id=1)
    assert after.topk_ids.equal(free.topk_ids), "the plan ends with its forward pass"


def test_forward_pass_around_the_hook_of_forcing_is_an_error(forcing):
    plan = torch.zeros((3, 2, 2), dtype=torch.int32)
    with pytest.raises(RuntimeError, match="0 of 2 layers"), applied(forcing, plan):
        pass
    with pytest.raises(RuntimeError, match="plan"), applied(forcing, plan[:2]):
        forcing.select_forced(select, None, torch.randn(3, 8), SimpleNamespace(renormalize=True), layer_id=0)


@pytest.mark.parametrize(("answers", "success"), [("11", True), ("10", False), ("01", False)])
async def test_flush_all_reports_the_failure_of_any_scheduler(forcing, monkeypatch, answers, success):
    loading = importlib.import_module("async_rl_sglang.loading")
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", SimpleNamespace(FlushCacheReqInput=dict))

    async def ask(request):
        assert request == {"timeout_s": 3.0}
        return [SimpleNamespace(success=answer == "1") for answer in answers]

    manager = SimpleNamespace(flush_cache_communicator=ask)
    assert (await loading.flush_all(None, manager, timeout_s=3.0)).success is success
