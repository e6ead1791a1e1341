"""Megatron's Transformer Engine spec, over modules that are laid out like those, gives what the local spec gives."""

from dataclasses import replace

import pytest
import torch

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.state.optimizer import OptimizerConfig
from tests.e2e.test_trainer_families import exported, saved
from tests.helpers import numerics, tiny_models
from tests.parallel.support import (
    TRAINER,
    assert_equal_gradients,
    assert_equal_metrics,
    assert_equal_weights,
    assert_near,
    gradients,
    load_reference,
    make_batch,
    policy_terms,
    reference_step,
    start_trainer,
)

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MODELS = {
    "deepseek_v3": lambda: tiny_models.deepseek_v3_config(
        q_lora_rank=48, kv_lora_rank=40, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20
    ),
    "deepseek_v3-whole-query": lambda: tiny_models.deepseek_v3_config(
        q_lora_rank=None, kv_lora_rank=40, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20
    ),
    "glm4_moe": lambda: tiny_models.glm4_moe_config(num_hidden_layers=3),
    "qwen3": lambda: tiny_models.qwen3_dense_config(num_hidden_layers=2),
}
# A large eps keeps an update smooth in its gradient.
ADAM = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=1.0)


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """A checkpoint, its batch, the update by transformers, and trainers of the local spec and of the fused one."""
    config = MODELS[request.param]()
    checkpoint = tiny_models.save_checkpoint(config, tmp_path_factory.mktemp("specs"), seed=1, vectors=True)
    layers = 0 if request.param == "qwen3" else config.num_hidden_layers - 1
    batch = make_batch((23, 9, 31, 14), routed=layers > 0, layers=layers)
    loss = DecoupledPPO(entropy_coefficient=0.01)
    batch["token_ids"].clamp_(min=1)  # transformers takes no gradient for the padding token, 0
    expected = reference_step(load_reference(checkpoint), batch, policy_terms(loss), routed=layers > 0)
    settings = {"optimizer": ADAM, "loss": loss}
    settings["router_replay"] = "R3" if layers else "none"
    trainers = [start_trainer(checkpoint, fused=fused, **settings) for fused in (False, True)]
    yield checkpoint, batch, expected, *trainers
    for trainer in reversed(trainers):  # the first owns the process groups
        trainer.close()


def test_a_model_of_either_spec_is_what_the_checkpoint_holds_and_gives_the_same(pair, tmp_path):
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
    assert_equal_gradients(gradients(fused), expected, gradients(local))  # which are clipped
    assert_equal_metrics(routings[1], routings[0], expected)

    # Decay spares the same weights: norms and biases stay within what the gradient moves them by.
    for optimizer in (t._optimizer._inner for t in (local, fused)):
        for group in optimizer.param_groups:
            assert all((p.dim() == 1) == (group["wd_mult"] == 0) for p in group["params"])
    assert_equal_weights(exported(fused), exported(local), expected, optimizer=ADAM, updates=1)

    # A checkpoint of the one is continued by the other.
    for number, (one, other) in enumerate(((fused, local), (local, fused)), start=2):
        one.save(tmp_path / "state")
        one.train(batch)
        other.restore(tmp_path / "state")
        other.train(batch)
        assert_equal_weights(exported(other), exported(one), expected, optimizer=ADAM, updates=number)


def test_transformer_engine_is_refused_where_it_cannot_be_used(tmp_path):
    from async_rl.trainer.model.layers import uses_transformer_engine

    cpu = torch.device("cpu")
    asked = replace(TRAINER, dtype="bfloat16", layer_spec="transformer_engine")
    with pytest.raises(ValueError, match=r"layer_spec is transformer_engine, but this rank computes on cpu; give it a"):
        uses_transformer_engine(asked, device=cpu)
    assert not uses_transformer_engine(replace(asked, layer_spec="auto"), device=cpu)
    with pytest.raises(ValueError, match=r"with trainer\.dtype=float32.* no kernels .*; use dtype=bfloat16"):
        replace(asked, dtype="float32")
    with pytest.raises(ValueError, match=r"trainer\.layer_spec is 'te'; use auto, local or transformer_engine"):
        replace(TRAINER, layer_spec="te")


def test_auto_is_transformer_engine_where_it_is_installed_and_new_enough(monkeypatch):
    from async_rl.trainer.model import layers

    gpu, auto = torch.device("cuda"), replace(TRAINER, dtype="bfloat16")
    monkeypatch.setattr(layers.gpt_layer_specs, "HAVE_TE", True)
    for version, used in ((False, False), (True, True)):
        monkeypatch.setattr(layers, "is_te_min_version", lambda _oldest, version=version: version)
        assert layers.uses_transformer_engine(auto, device=gpu) is used
    assert not layers.uses_transformer_engine(replace(auto, dtype="float32"), device=gpu)
    assert not layers.uses_transformer_engine(replace(auto, layer_spec="local"), device=gpu)
    monkeypatch.setattr(layers, "is_te_min_version", lambda _oldest: False)
    with pytest.raises(ValueError, match=r"transformer_engine is .*; install 1\.10\.0 or later"):
        layers.uses_transformer_engine(replace(auto, layer_spec="transformer_engine"), device=gpu)
    monkeypatch.setattr(layers.gpt_layer_specs, "HAVE_TE", False)
    with pytest.raises(ValueError, match=r"cannot be imported; install transformer-engine"):
        layers.uses_transformer_engine(replace(auto, layer_spec="transformer_engine"), device=gpu)
