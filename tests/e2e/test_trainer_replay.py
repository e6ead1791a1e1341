"""Router replay in the whole trainer: its threshold, its metrics by layer, and the parts that are not replayed."""

import pytest
import torch

from tests.helpers import numerics
from tests.parallel.support import (
    EXPERTS,
    LAYERS,
    MARKS,
    TOP_K,
    assert_equal_metrics,
    assert_near,
    assert_trains_as,
    expected_step,
    gradients,
    largest_difference,
    make_batch,
    start_trainer,
)

pytestmark = MARKS

WHOLE = {"micro_batch_tokens": 4096}  # one micro-batch


@pytest.fixture(scope="module")
def trainer(checkpoint):
    """Replays every row; owns the process group of this module's trainers."""
    trainer = start_trainer(checkpoint, **WHOLE)
    yield trainer
    trainer.close()


def routers(trainer):
    return {layer: trainer.model.chunks[0].decoder.layers[layer].mlp.router for layer in LAYERS}


def router_inputs(trainer, batch):
    """Metrics of an update, and the input of the router of each layer, float32 [t, hidden]."""
    seen, hooks = {}, []
    for layer, router in routers(trainer).items():

        def keep(_router, args, layer=layer):
            seen[layer] = args[0].detach().flatten(0, -2)

        hooks.append(router.register_forward_pre_hook(keep))
    metrics = trainer.train(batch)
    for hook in hooks:
        hook.remove()
    return metrics, seen


def test_gate_mass_and_overlap_of_each_layer_are_those_of_its_live_router(trainer):
    batch = make_batch((19,))
    metrics, inputs = router_inputs(trainer, batch)
    for i, layer in enumerate(LAYERS):
        weight = routers(trainer)[layer].weight.detach().double()
        scores = (inputs[layer].double() @ weight.T).softmax(-1)[:-1]
        rows = batch["routed_experts"][0, :-1, i].long()  # the last has none
        live = scores.topk(TOP_K).indices
        overlap = (rows.unsqueeze(2) == live.unsqueeze(1)).any(2).double().mean()
        # A softmax is less steep than 1 in the logits, each a float32 dot product.
        bound = numerics.rounding(weight.shape[1]) * (inputs[layer].double().abs() @ weight.abs().T).max().item()
        mass = scores.gather(1, rows).sum(1).mean().item()
        numerics.assert_within(abs(metrics[f"routing/gate_mass_layer{layer}"] - mass), bound)
        assert metrics[f"routing/overlap_layer{layer}"] == pytest.approx(overlap.item())
        assert metrics[f"routing/fallback_fraction_layer{layer}"] == pytest.approx(1 / 19)
    by_layer = [metrics[f"routing/gate_mass_layer{layer}"] for layer in LAYERS]
    assert metrics["routing/gate_mass"] == pytest.approx(sum(by_layer) / len(LAYERS))
    assert metrics["routing/refused_fraction"] == 0


def test_metrics_are_the_same_with_layers_computed_twice(trainer, checkpoint):
    expected = trainer.train(make_batch())
    again = start_trainer(checkpoint, recompute="full", **WHOLE).train(make_batch())
    assert_equal_metrics(again, expected, expected_step(checkpoint, make_batch()))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_threshold_of_one_trains_as_the_live_router_does(trainer, checkpoint, recompute):
    live = start_trainer(checkpoint, router_replay="none", **WHOLE)
    strict = start_trainer(checkpoint, replay_threshold=1.0, recompute=recompute, **WHOLE)
    reference = expected_step(checkpoint, make_batch(), routed=False)
    assert_trains_as(live, make_batch(), reference)
    got = assert_trains_as(strict, make_batch(), reference)
    # Random rows and the live choice have an expert in common now and then.
    assert got["routing/refused_fraction"] == pytest.approx(1 - got["routing/overlap"])
    assert 0 < got["routing/overlap"] < 1


def test_a_threshold_between_refuses_some(trainer, checkpoint):
    some = start_trainer(checkpoint, replay_threshold=0.05, **WHOLE)
    metrics = some.train(make_batch())
    trainer.train(make_batch())
    assert 0 < metrics["routing/refused_fraction"] < 1 - metrics["routing/overlap"]
    bound = expected_step(checkpoint, make_batch()).gradient_bound
    assert largest_difference(gradients(some), gradients(trainer)) > 100 * bound


def test_the_balance_loss_under_replay_is_of_the_routers_own_choice(trainer, checkpoint):
    coefficient, layer = 0.5, LAYERS[-1]
    balanced = start_trainer(checkpoint, aux_loss_coefficient=coefficient, **WHOLE)
    trainer.train(make_batch())
    _, inputs = router_inputs(balanced, make_batch())
    weight = routers(balanced)[layer].weight.detach().clone().requires_grad_()
    scores = (inputs[layer] @ weight.T).softmax(-1)
    counts = torch.bincount(scores.topk(TOP_K).indices.flatten(), minlength=EXPERTS)
    # Switch Transformer (arXiv 2101.03961), eq. 4, for top-k: E sum_e f_e P_e over the tokens of the batch.
    loss = EXPERTS * (counts / (TOP_K * len(scores)) * scores.mean(0)).sum()
    (expected,) = torch.autograd.grad(coefficient * loss, weight)
    name = f"model.layers.{layer}.mlp.gate.weight"
    got = gradients(balanced)[name] - gradients(trainer)[name]
    # Both gradients are off by the bound of the reference, relative to the largest entry of the one without the loss.
    bound = 2 * expected_step(checkpoint, make_batch()).gradient_bound * gradients(trainer)[name].abs().max().item()
    assert_near(got, expected, bound=bound)
    assert expected.abs().max() > 100 * bound
