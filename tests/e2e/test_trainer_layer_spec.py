"""Megatron's Transformer Engine spec, over modules with its layout, gives the results of the local spec."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.state.optimizer import OptimizerConfig
from tests.e2e import families
from tests.e2e.families import SMALL_LATENT, Family
from tests.helpers import numerics, tiny_models
from tests.parallel.support import (
    MARKS,
    TRAINER,
    assert_equal_gradients,
    assert_equal_metrics,
    assert_equal_weights,
    assert_near,
    assert_same,
    assert_trains_as,
    exported,
    gradients,
)

pytestmark = MARKS

MODELS = {
    **{name: families.MODELS[name] for name in ("deepseek_v3", "glm4_moe", "qwen3")},
    "deepseek_v3-whole-query": lambda: tiny_models.deepseek_v3_config(**{**SMALL_LATENT, "q_lora_rank": None}),
}
LOSS = DecoupledPPO(entropy_coefficient=0.01)
# A large eps keeps an update smooth in its gradient.
ADAM = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=1.0)


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """A family, its batch, the update by transformers, and trainers of the local spec and of the fused one."""
    family = Family(MODELS[request.param](), tmp_path_factory.mktemp("specs"), loss=LOSS)
    trainers = [family.start(fused=fused, optimizer=ADAM) for fused in (False, True)]
    batch = family.batch()
    yield family, batch, family.expected(batch), *trainers
    for trainer in reversed(trainers):  # the first owns the process groups
        trainer.close()


def test_models_of_both_specs_hold_and_give_the_same(pair, tmp_path):
    family, batch, expected, local, fused = pair
    names = [name for name, _ in fused.model.chunks[0].named_parameters()]
    assert any(name.endswith(".layer_norm_weight") for name in names)
    if fused.model.replay is not None:
        assert {f"decoder.layers.1.mlp.experts.linear_fc{n}.weight{e}" for n in (1, 2) for e in range(8)} <= {*names}
        assert not any("local_experts" in name for name in names)
    for trainer in (local, fused):
        assert_same(exported(trainer), load_file(family.checkpoint / "model.safetensors"))

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

    family, batch, expected, local, _ = pair
    fusions = gpt.fusions
    monkeypatch.setattr(gpt, "fusions", lambda shape, _device: fusions(shape, torch.device("cuda")))
    trainer = family.start(optimizer=replace(ADAM, clip_grad=0.0))
    assert trainer.model.config.bias_activation_fusion and not local.model.config.bias_activation_fusion
    assert_trains_as(trainer, batch, expected)
    trainer.close()


@pytest.mark.parametrize(
    ("device", "installed", "new_enough", "asked", "used"),
    [
        ("cuda", True, True, {}, True),
        ("cuda", True, False, {}, False),
        ("cuda", True, True, {"dtype": "float32"}, False),
        ("cuda", True, True, {"layer_spec": "local"}, False),
        ("cpu", True, True, {}, False),
        ("cpu", True, True, {"layer_spec": "transformer_engine"}, "layer_spec"),
        ("cuda", True, False, {"layer_spec": "transformer_engine"}, r"1\.10\.0"),
        ("cuda", False, False, {"layer_spec": "transformer_engine"}, "transformer_engine"),
        ("cuda", True, True, {"layer_spec": "transformer_engine", "dtype": "float32"}, r"trainer\.dtype"),
        ("cuda", True, True, {"layer_spec": "te"}, r"trainer\.layer_spec"),
    ],
)
def test_transformer_engine_is_used_if_it_can_be(monkeypatch, device, installed, new_enough, asked, used):
    """used: whether it is, or the pattern of the refusal."""
    from async_rl.trainer.model import layers

    monkeypatch.setattr(layers.gpt_layer_specs, "HAVE_TE", installed)
    monkeypatch.setattr(layers, "is_te_min_version", lambda _oldest: new_enough)

    def uses():
        return layers.uses_transformer_engine(
            replace(TRAINER, **{"dtype": "bfloat16", **asked}), device=torch.device(device)
        )

    if isinstance(used, bool):
        assert uses() is used
    else:
        with pytest.raises(ValueError, match=used):
            uses()
