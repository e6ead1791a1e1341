"""Megatron's Transformer Engine spec, over modules with its layout, gives the results of the local spec."""

from dataclasses import replace

import pytest
import torch

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.state.optimizer import OptimizerConfig
from tests.e2e.test_trainer_families import SMALL_LATENT, exported, saved
from tests.helpers import numerics, tiny_models
from tests.parallel.support import (
    MARKS,
    TRAINER,
    assert_equal_gradients,
    assert_equal_metrics,
    assert_equal_steps,
    assert_equal_weights,
    assert_near,
    gradients,
    load_reference,
    make_batch,
    policy_terms,
    reference_step,
    start_trainer,
)

pytestmark = MARKS

MODELS = {
    "deepseek_v3": lambda: tiny_models.deepseek_v3_config(**SMALL_LATENT),
    "deepseek_v3-whole-query": lambda: tiny_models.deepseek_v3_config(**{**SMALL_LATENT, "q_lora_rank": None}),
    "glm4_moe": lambda: tiny_models.glm4_moe_config(num_hidden_layers=3),
    "qwen3": lambda: tiny_models.qwen3_dense_config(num_hidden_layers=2),
}
LOSS = DecoupledPPO(entropy_coefficient=0.01)
# A large eps keeps an update smooth in its gradient.
ADAM = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=1.0)


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """A checkpoint, its batch, the update by transformers, and trainers of the local spec and of the fused one."""
    config = MODELS[request.param]()
    checkpoint = tiny_models.save_checkpoint(config, tmp_path_factory.mktemp("specs"), seed=1, vectors=True)
    layers = 0 if request.param == "qwen3" else config.num_hidden_layers - 1
    batch = make_batch((23, 9, 31, 14), routed=layers > 0, layers=layers)
    batch["token_ids"].clamp_(min=1)  # transformers takes no gradient for the padding token, 0
    expected = reference_step(load_reference(checkpoint), batch, policy_terms(LOSS), routed=layers > 0)
    settings = {"optimizer": ADAM, "loss": LOSS}
    settings["router_replay"] = "R3" if layers else "none"
    trainers = [start_trainer(checkpoint, fused=fused, **settings) for fused in (False, True)]
    yield checkpoint, batch, expected, *trainers
    for trainer in reversed(trainers):  # the first owns the process groups
        trainer.close()


def test_models_of_both_specs_hold_and_give_the_same(pair, tmp_path):
    checkpoint, batch, expected, local, fused = pair
    names = [name for name, _ in fused.model.chunks[0].named_parameters()]
    assert any(name.endswith(".layer_norm_weight") for name in names)
    if fused.model.replay is not None:
        assert {f"decoder.layers.1.mlp.experts.linear_fc{n}.weight{e}" for n in (1, 2) for e in range(8)} <= {*names}
        assert not any("local_experts" in name for name in names)
    whole, held = exported(fused), saved(checkpoint)
    assert whole.keys() == held.keys() == exported(local).keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in held.items())

    mask = batch["loss_mask"]
    for trainer in (local, fused):
        assert_near(trainer.logprobs(batch)[mask], expected.logprobs[mask], bound=expected.logprob_bound)
    routings = [trainer.train(batch) for trainer in (local, fused)]
    for metrics in routings:
        numerics.assert_within(abs(metrics["loss"] - expected.loss), expected.loss_bound)
    assert_equal_gradients(gradients(fused), expected, gradients(local))  # clipped gradients
    assert_equal_metrics(routings[1], routings[0], expected)

    # Decay spares the same weights: norms and biases move with the gradient alone.
    for optimizer in (t._optimizer._inner for t in (local, fused)):
        for group in optimizer.param_groups:
            assert all((p.dim() == 1) == (group["wd_mult"] == 0) for p in group["params"])
    assert_equal_weights(exported(fused), exported(local), expected, optimizer=ADAM, updates=1)

    # A checkpoint of the one is continued by the other.
    for number, (one, other) in enumerate(((fused, local), (local, fused)), start=2):
        one.save(tmp_path / "state").result()
        one.train(batch)
        other.restore(tmp_path / "state")
        other.train(batch)
        assert_equal_weights(exported(other), exported(one), expected, optimizer=ADAM, updates=number)


def test_the_activation_of_a_gpu_has_the_gradient_of_the_plain_one(pair, monkeypatch):
    from async_rl.trainer.model import gpt

    checkpoint, batch, expected, local, _ = pair
    fusions = gpt.fusions
    monkeypatch.setattr(gpt, "fusions", lambda shape, _device: fusions(shape, torch.device("cuda")))
    settings = {"loss": LOSS, "router_replay": "R3" if local.model.replay else "none"}
    trainer = start_trainer(checkpoint, optimizer=replace(ADAM, clip_grad=0.0), **settings)
    assert trainer.model.config.bias_activation_fusion and not local.model.config.bias_activation_fusion
    assert_equal_steps(trainer.train(batch)["loss"], gradients(trainer), expected)
    trainer.close()


def test_transformer_engine_is_refused_if_it_cannot_be_used(tmp_path):
    from async_rl.trainer.model.layers import uses_transformer_engine

    cpu = torch.device("cpu")
    asked = replace(TRAINER, dtype="bfloat16", layer_spec="transformer_engine")
    with pytest.raises(ValueError, match="layer_spec"):
        uses_transformer_engine(asked, device=cpu)
    assert not uses_transformer_engine(replace(asked, layer_spec="auto"), device=cpu)
    with pytest.raises(ValueError, match=r"trainer\.dtype"):
        replace(asked, dtype="float32")
    with pytest.raises(ValueError, match=r"trainer\.layer_spec"):
        replace(TRAINER, layer_spec="te")


def test_auto_is_transformer_engine_if_a_new_enough_one_is_installed(monkeypatch):
    from async_rl.trainer.model import layers

    gpu, auto = torch.device("cuda"), replace(TRAINER, dtype="bfloat16")
    monkeypatch.setattr(layers.gpt_layer_specs, "HAVE_TE", True)
    for version, used in ((False, False), (True, True)):
        monkeypatch.setattr(layers, "is_te_min_version", lambda _oldest, version=version: version)
        assert layers.uses_transformer_engine(auto, device=gpu) is used
    assert not layers.uses_transformer_engine(replace(auto, dtype="float32"), device=gpu)
    assert not layers.uses_transformer_engine(replace(auto, layer_spec="local"), device=gpu)
    monkeypatch.setattr(layers, "is_te_min_version", lambda _oldest: False)
    with pytest.raises(ValueError, match=r"1\.10\.0"):
        layers.uses_transformer_engine(replace(auto, layer_spec="transformer_engine"), device=gpu)
    monkeypatch.setattr(layers.gpt_layer_specs, "HAVE_TE", False)
    with pytest.raises(ValueError, match="transformer_engine"):
        layers.uses_transformer_engine(replace(auto, layer_spec="transformer_engine"), device=gpu)
