"""Checkpoints of other architectures: weights that do not fit are named, and an unknown one gets its nearest family."""

import itertools
import json
import re

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from async_rl.trainer.model.families import FAMILIES, read_shape
from async_rl.trainer.model.families.nearest import nearest_family
from async_rl.trainer.model.families.weights import expected_weights, pattern
from async_rl.trainer.model.layout import weight_problems
from async_rl.weights.model_info import CheckpointError, read_config
from async_rl.weights.quantized import plain_names
from tests.e2e.families import MODELS
from tests.helpers import tiny_models

pytestmark = pytest.mark.numerics

SEEN = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def names_in(folder):
    names = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
    return {name for name in names if not name.startswith("model.visual.")}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Model -> checkpoint of transformers."""
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_models.save_checkpoint(config(), folder / name, seed=1) for name, config in MODELS.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_expected_weights_are_those_of_transformers(name, checkpoints):
    shape, names = read_shape(checkpoints[name]), names_in(checkpoints[name])
    assert expected_weights(shape) == names
    assert list(weight_problems(shape, names)) == []


def test_tensors_that_change_nothing_are_accepted(tmp_path):
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    for number, name in enumerate(("llama-tied", "deepseek_v3", "gpt_oss", "qwen3_moe")):
        folder = tiny_models.save_checkpoint(MODELS[name](), tmp_path / f"{number}", seed=1)
        more = {"llama-tied": {"lm_head.weight", frequencies}}.get(name, set())
        if name == "deepseek_v3":
            tiny_models.add_prediction_layer(folder)
            tiny_models.quantize_fp8(folder)
        if name == "gpt_oss":
            tiny_models.quantize_mxfp4(folder)
        names = {*plain_names(names_in(folder) | more)}
        if name == "qwen3_moe":  # all experts of a layer in one tensor
            names = {each for each in names if ".experts." not in each}
            names |= {f"model.layers.{i}.mlp.experts.{p}_proj" for i in (1, 2) for p in ("gate_up", "down")}
        assert list(weight_problems(read_shape(folder), names)) == []


MODULES = ("self_attn.o_proj", "self_attn.q_proj", "mlp.extra", "post_feedforward_layernorm", "mlp.experts.1.up_proj")


@given(data=st.data())
@SEEN
def test_weights_that_the_family_does_not_have_and_missing_ones_are_named(data, checkpoints):
    name = data.draw(st.sampled_from([*MODELS]))
    shape, names = read_shape(checkpoints[name]), names_in(checkpoints[name])
    layer = data.draw(st.integers(0, shape.megatron["num_layers"] - 1))
    extra = data.draw(st.sets(st.sampled_from(MODULES), max_size=3))
    added = {f"model.layers.{layer}.{module}.bias" for module in extra} - names
    dropped = data.draw(st.sets(st.sampled_from(sorted(names)), max_size=3))
    problems = " ".join(weight_problems(shape, names - dropped | added))
    assert bool(problems) == bool(added or dropped)
    for each in added | dropped:
        assert each in problems or f"{pattern(each)} (" in problems
    for each in names - dropped:
        assert not re.search(rf" {re.escape(each)}(?![\w.])", problems)


# ---- unknown model_type

# Each has a field of its own name, which no family reads.
UNREAD = {"logits_scaling": 8.0, "attn_logit_softcapping": 50.0, "residual_multiplier": 0.22, "no_rope_layers": [1, 0]}
VALUES = {
    "hidden_act": "gelu_pytorch_tanh",
    "mlp_bias": True,
    "use_sliding_window": True,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4},
}
DERIVED = {"head_dim", "qk_head_dim", "mlp_layer_types"}  # from other fields, in configs of latent attention
NEEDED = ("hidden_size", "num_attention_heads", "rms_norm_eps")


@given(data=st.data())
@SEEN
def test_the_nearest_family_is_told_with_each_drawn_difference(data, checkpoints, tmp_path_factory):
    name = data.draw(st.sampled_from([*MODELS]))
    config = read_config(checkpoints[name])
    weights = {each: torch.zeros(1) for each in names_in(checkpoints[name])}
    family = config["model_type"]
    unread = data.draw(st.sets(st.sampled_from([*UNREAD]), max_size=2))
    # The weights of a hybrid follow from its kinds of layers: without them there are other differences.
    values = [field for field in VALUES if field != "layer_types" or "linear_key_head_dim" not in config]
    refused = data.draw(st.sets(st.sampled_from(values), max_size=2))
    needed = [field for field in NEEDED if (family, field) != ("olmoe", "rms_norm_eps")]  # it has one value there
    absent = data.draw(st.sets(st.sampled_from(needed), max_size=1))
    projection = "self_attn.o_proj" if data.draw(st.booleans()) else "post_attention_layernorm"
    renamed = data.draw(st.booleans())
    config |= {"model_type": "new", **{f: UNREAD[f] for f in unread}, **{f: VALUES[f] for f in refused}}
    config = {field: value for field, value in config.items() if field not in absent}
    changed = {each for each in weights if f".{projection}.weight" in each} if renamed else set()
    for each in changed:
        weights[each.replace(projection, "other")] = weights.pop(each)
    folder = tmp_path_factory.mktemp("new")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    found = nearest_family(folder, config, FAMILIES)
    assert found.family == family or FAMILIES[found.family].layer_weights == FAMILIES[family].layer_weights
    assert found.missing == changed
    assert found.unknown == {each.replace(projection, "other") for each in changed}
    assert {text.partition("=")[0] for text in found.refused} == {
        {"rope_parameters": "rope_type"}.get(field, field) for field in refused
    }
    assert set(found.absent) == absent
    assert {text.partition("=")[0] for text in found.unread} - DERIVED == unread
    with pytest.raises(CheckpointError) as error:
        read_shape(folder)
    text = str(error.value)
    assert str(folder) in text and "'new'" in text and str(found) in text and len(text) < 3000
    for each in (*unread, *absent):
        assert each in text


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
SIGMOID = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 40, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20}
# model_type of transformers -> settings, the nearest family, and parts of its text.
OTHERS = {
    "mistral": ({}, "llama", ["sliding_window=4096"]),
    "granite": ({"embedding_multiplier": 12.0}, "llama", ["embedding_multiplier=12.0"]),
    "gemma3_text": ({}, "qwen3", ["pre_feedforward_layernorm.weight (4)", "hidden_activation=", "sliding_attention"]),
    "olmo2": ({}, "qwen3", ["post_feedforward_layernorm.weight (4)", "input_layernorm.weight (4)"]),
    "smollm3": ({}, "llama", ["no_rope_layers=[1, 1, 1, 0]"]),
    "glm4": ({}, "qwen2", ["mlp.gate_up_proj.weight (4)", "post_self_attn_layernorm", "partial_rotary_factor=0.5"]),
    "phimoe": ({**EXPERTS, "num_local_experts": 8}, "mixtral", ["input_layernorm.bias (4)", "model.norm.bias"]),
    "minimax": (
        {**EXPERTS, "num_local_experts": 8},
        "mixtral",
        ["self_attn.output_gate.weight (2)", "q_proj.weight (2)", "linear_attention", "block_size=256"],
    ),
    "minimax_m2": ({**EXPERTS, "num_local_experts": 8}, "mixtral", ["e_score_correction_bias (4)", "q_norm"]),
    "granitemoe": ({**EXPERTS, "num_local_experts": 8}, "llama", ["block_sparse_moe.input_linear.weight (4)"]),
    "ernie4_5_moe": (
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64},
        "glm4_moe",
        ["mlp.moe_statics.e_score_correction_bias (3)", "n_routed_experts", "moe_k=2"],
    ),
    "hunyuan_v1_moe": (
        {"num_experts": 8, "moe_topk": 2, "moe_intermediate_size": 64},
        "glm4_moe",
        ["mlp.gate.wg.weight (4)", "self_attn.key_layernorm.weight (4)", "shared_mlp", "moe_topk=2"],
    ),
    "solar_open": (SIGMOID, "glm4_moe", ["first_k_dense_replace"]),
    "deepseek_v2": (
        {**SIGMOID, **LATENT, "first_k_dense_replace": 1},
        "deepseek_v3",
        ["e_score_correction_bias (3)", "topk_method='greedy'"],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_architectures_of_transformers_are_told_apart_from_the_nearest_family(name, tmp_path):
    changes, family, parts = OTHERS[name]
    config = transformers.AutoConfig.for_model(name, **{**tiny_models.COMMON, "head_dim": 32, **changes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as error:
        read_shape(tmp_path)
    text = str(error.value)
    assert f"nearest is {family};" in text and all(part in text for part in parts), text
    assert "\n" not in text and len(text) < 3000
    assert nearest_family(tmp_path, json.loads((tmp_path / "config.json").read_text()), FAMILIES).family == family


def test_names_come_from_the_index_alone_and_a_folder_without_weights_is_compared_by_fields(tmp_path):
    tiny_models.qwen3_moe_config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "new"}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"nearest is qwen3_moe[^$]*no safetensors"):
        read_shape(tmp_path)
    numbers = itertools.product(range(4), range(8), ("gate", "up", "down"))
    names = [f"model.layers.{i}.block_sparse_moe.experts.{e}.{p}_proj.weight" for i, e, p in numbers]
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert nearest_family(tmp_path, config, FAMILIES).unknown == set(names)
