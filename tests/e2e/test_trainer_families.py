"""Every model family against transformers: weights, live and replayed routing, losses, gradients, and export."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.families import FAMILIES, read_shape
from async_rl.trainer.model.layout import layout_problems
from async_rl.trainer.model.model import LoraConfig, ParallelConfig
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.model_info import CheckpointError
from async_rl.weights.pretrained import keep_model_files
from tests.e2e.families import MODELS, Family
from tests.helpers import tiny_models
from tests.parallel.support import (
    MARKS,
    TRAINER,
    assert_near,
    assert_same,
    assert_trains_as,
    checkpoint_names,
    expected_step,
    exported,
    gradients,
    load_reference,
    start_trainer,
)

pytestmark = [*MARKS, pytest.mark.usefixtures("owner")]

LOSS = DecoupledPPO(entropy_coefficient=0.01)
FAMILY_OF = {name: FAMILIES[name.partition("-")[0]] for name in MODELS}
with_experts = pytest.mark.parametrize(
    "case", [name for name, family in FAMILY_OF.items() if family.expert_weights], indirect=True
)
with_correction_bias = pytest.mark.parametrize(
    "case",
    [name for name, family in FAMILY_OF.items() if "mlp.router.expert_bias" in family.layer_weights],
    indirect=True,
)


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    return Family(MODELS[request.param](), tmp_path_factory.mktemp("families"), loss=LOSS)


def saved(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "changes", [{}, {"packing": False}, {"recompute": "full"}, {"recompute": "selective"}], ids=str
)
def test_update_equals_that_of_a_reference_forced_to_the_same_experts(case, changes):
    batch, trainer = case.batch(), case.start(**changes)
    expected = case.expected(batch)
    assert_trains_as(trainer, batch, expected)
    routers = [name for name in gradients(trainer) if name.endswith((".gate.weight", ".router.weight"))]
    assert len(routers) == case.layers
    # Each tensor is compared relative to its largest entry: the bound would be above 1 if one were rounding alone.
    assert expected.gradient_bound < 1e-2


@with_experts
def test_recording_and_replaying_in_the_trainer_equals_the_live_router(case):
    batch = case.batch()
    metrics = assert_trains_as(case.start(router_replay="R2"), batch, case.expected(batch, routed=False))
    assert metrics["routing/overlap"] == 1.0


def test_weights_survive_the_way_through_megatron_bit_for_bit(case):
    trained = {name: weight for name, weight in saved(case.checkpoint).items() if not name.startswith("model.visual.")}
    assert_same(exported(case.start()), trained)


def test_an_exported_checkpoint_loads_in_transformers(case, tmp_path):
    trainer = case.start(optimizer=OptimizerConfig(lr=1e-3))
    batch = case.batch()
    trainer.train(batch)
    weights = exported(trainer)
    before = saved(case.checkpoint)
    trained = {name for name in weights if not torch.equal(weights[name], before[name])}
    # The correction bias is no parameter: it stays unchanged.
    assert trained == {name for name in weights if not name.endswith("e_score_correction_bias")}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((case.checkpoint / "config.json").read_bytes())
    reference = load_reference(tmp_path)
    loaded = checkpoint_names(reference, reference.state_dict())
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    expected = expected_step(tmp_path, batch, routed=case.layers > 0)
    mask = batch["loss_mask"]
    assert_near(trainer.logprobs(batch)[mask], expected.logprobs[mask], bound=expected.logprob_bound)


@with_correction_bias
def test_the_correction_bias_stays_float32_in_a_bfloat16_model(case):
    bias = "e_score_correction_bias"
    theirs = {name: weight for name, weight in saved(case.checkpoint).items() if name.endswith(bias)}
    assert theirs
    trainer = case.start(dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-3))
    trainer.train(case.batch())
    ours = exported(trainer)
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert all(weight.dtype == torch.bfloat16 for name, weight in ours.items() if not name.endswith(bias))
    for layer in trainer.model.chunks[0].decoder.layers[1:]:
        assert not layer.mlp.router.local_tokens_per_expert.any()


@pytest.mark.parametrize("case", ["qwen3_5_moe_text-vision"], indirect=True)
def test_decay_rates_stay_float32_in_a_bfloat16_model(case):
    theirs, batch = saved(case.checkpoint), case.batch()
    trainer = case.start(dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-5))
    start = exported(trainer)
    trainer.train(batch)
    for name, weight in exported(trainer).items():
        if name.endswith("A_log"):
            assert torch.equal(start[name], theirs[name])
            assert not torch.equal(weight, start[name])
            assert torch.equal(weight.bfloat16(), start[name].bfloat16()), "bfloat16 would lose this update"
        else:
            assert weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen3", {"num_key_value_heads": 4}, r"q_proj.weight \[128, 128\].*linear_qkv.weight"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 48}, r"shared_expert.*\[96, 128\]"),
        ("deepseek_v3", {"kv_lora_rank": 44}, "linear_kv_down_proj.weight"),
    ],
)
def test_weights_of_another_shape_than_the_config_are_refused(tmp_path, family, changes, named):
    checkpoint = tiny_models.save_checkpoint(MODELS[family](), tmp_path, seed=1)
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=named):
        start_trainer(checkpoint, router_replay="none")


ADDED = {
    "deepseek_v3": tiny_models.add_prediction_layer,
    "glm4_moe": tiny_models.add_prediction_layer,
    "qwen3_next": tiny_models.add_mtp_weights,
    "qwen3_5_moe_text-vision": tiny_models.add_mtp_weights,
}


@pytest.mark.parametrize("family", ADDED)
def test_tensors_that_are_not_trained_are_exported_unchanged(tmp_path, family):
    checkpoint = tiny_models.save_checkpoint(MODELS[family](), tmp_path / "start", seed=1)
    plain = saved(checkpoint)
    carried = ADDED[family](checkpoint)
    trainer = start_trainer(checkpoint, router_replay="none")
    keep_model_files(checkpoint, tmp_path / "model")
    trainer.save_pretrained(tmp_path / "final", like=tmp_path / "model")
    assert_same(saved(tmp_path / "final"), plain | carried)
    auto = AutoModelForImageTextToText if family.endswith("-vision") else AutoModelForCausalLM
    assert not auto.from_pretrained(tmp_path / "final", output_loading_info=True)[1]["missing_keys"]


qwen3 = tiny_models.qwen3_dense_config
WIDE = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 48, "intermediate_size": 384}


@pytest.mark.parametrize(
    ("model", "size", "lora", "named"),
    [
        (tiny_models.qwen2_moe_config(shared_expert_intermediate_size=95), 2, 0, "95"),
        (tiny_models.olmoe_config(), 2, 0, "all heads"),
        (qwen3(), 4, 0, None),  # 2 key-value heads, each on two ranks
        (qwen3(), 4, 4, "trainer.lora.rank=4"),
        (qwen3(), 8, 0, "4 attention heads"),
        (qwen3(**WIDE), 6, 0, "4 key-value heads"),
        (qwen3(num_attention_heads=8, num_key_value_heads=1, head_dim=2), 8, 0, "20 rows of queries"),
    ],
)
def test_a_layout_that_tensor_ranks_cannot_split_is_refused(tmp_path, model, size, lora, named):
    model.save_pretrained(tmp_path)
    config = replace(TRAINER, ranks=size, parallel=ParallelConfig(tensor=size), lora=LoraConfig(rank=lora))
    problems = list(layout_problems(read_shape(tmp_path), replace(config, router_replay="none")))
    assert len(problems) == (named is not None)
    assert all(f"trainer.parallel.tensor is {size}" in problem and named in problem for problem in problems)
