"""Model configs as the trainer reads them: the meaning of each family, and refusals."""

import json
import math

import pytest
import torch
from transformers import CONFIG_MAPPING, modeling_rope_utils

from async_rl.trainer.model.families import FAMILIES, read_shape
from async_rl.trainer.model.families.nearest import RecordedFields, has_no_effect
from async_rl.trainer.model.families.rope import RopeScaling
from async_rl.trainer.model.families.shape import shape_of
from async_rl.trainer.model.layout import layout_problems
from async_rl.trainer.model.model import LoraConfig, ParallelConfig, TrainerConfig
from async_rl.weights.model_info import CheckpointError, read_model_info
from tests.helpers import numerics, tiny_models

pytestmark = pytest.mark.numerics

LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 1024},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}


def write(folder, family, **changes):
    """A folder with the config of `family`; a value of None takes the field out."""
    config = tiny_models.tiny_config(family).to_dict() | changes
    config = {name: value for name, value in config.items() if name not in changes or value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_family_is_tested_here():
    assert tiny_models.FAMILIES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_model_info_agree_about_layers_and_experts(tmp_path, family):
    folder = write(tmp_path, family)
    shape, info = read_shape(folder), read_model_info(folder)
    assert info.family == family
    layers = shape.megatron.get("moe_layer_freq", [])
    if info.routing is None:
        assert not any(layers)
        return
    assert [i for i, has_experts in enumerate(layers) if has_experts] == list(info.routing.layers)
    assert shape.megatron["num_moe_experts"] == info.routing.num_experts
    assert shape.megatron["moe_router_topk"] == info.routing.top_k


DERIVED = {"head_dim", "qk_head_dim"}  # from other fields, in configs of latent attention


@pytest.mark.parametrize("family", FAMILIES)
def test_each_field_that_transformers_knows_is_read_or_has_no_effect(tmp_path, family):
    """Fields that it does not know change nothing in transformers; `read_shape` refuses those that engines read."""
    fields = RecordedFields(json.loads((write(tmp_path, family) / "config.json").read_text()))
    shape_of(fields, FAMILIES[family])
    unread = {name for name in CONFIG_MAPPING[family]().to_dict() if name not in fields.read}
    unread = {name for name in unread if not has_no_effect(fields, name)}
    assert unread - (DERIVED if "kv_lora_rank" in fields else set()) == set()


REFUSED = [
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config={'chunk_size': 8}"),
    ("llama", {"logit_scale": 0.5}, "logit_scale=0.5"),
    ("qwen3", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config='gptq'"),
    ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.weight_block_size=None"),
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias=True"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen2_moe", {"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
    ("mixtral", {"sliding_window": 4096}, "sliding_window=4096"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("qwen3_moe", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type='llama3'"),
    ("qwen3_moe", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
    ("glm4_moe", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
    ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor=0.1"),
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias=True"),
    ("deepseek_v3", {"n_group": 4, "topk_group": 2}, "topk_group=2"),
    ("deepseek_v3", {"kv_lora_rank": None}, "'kv_lora_rank'"),
    ("qwen3", {"model_type": "gemma"}, "model_type 'gemma'"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=False"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
    ("gpt_oss", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("gpt_oss", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "rope_theta"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads=3"),
    ("qwen3_next", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
    ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
    ("qwen3_next", {"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False"),
    ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
    ("qwen3_5_text", {"layer_scale": True}, "layer_scale=True"),
    ("qwen3_5_moe_text", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
    ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("qwen3_5_moe_text", {"text_config": {"tie_word_embeddings": True}}, "tie_word_embeddings=False and .* True"),
    ("qwen3_moe", {"vision_config": {}}, "vision_config"),
    ("olmoe", {"attention_bias": True}, "attention_bias=True"),
    ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob=True"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("olmoe", {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
    ("llama", {"attention_bias": True}, "attention_bias=True"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama", {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor=1.0"),
    ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "low_freq_factor"),
]


@pytest.mark.parametrize(("family", "changes", "named"), REFUSED, ids=[f"{f}-{next(iter(c))}" for f, c, _ in REFUSED])
def test_a_model_that_is_not_built_is_refused_by_field_and_value(tmp_path, family, changes, named):
    with pytest.raises(CheckpointError, match=named) as error:
        read_shape(write(tmp_path, family, **changes))
    assert str(tmp_path / "config.json") in str(error.value)


def test_more_pipeline_stages_than_layers_are_refused(tmp_path):
    shape = read_shape(write(tmp_path, "gpt_oss"))
    layers = shape.megatron["num_layers"]
    for parallel in (ParallelConfig(pipeline=layers), ParallelConfig(pipeline=layers - 1)):
        assert list(layout_problems(shape, TrainerConfig(ranks=parallel.pipeline, parallel=parallel))) == []
    for parallel in (ParallelConfig(pipeline=layers + 1), ParallelConfig(pipeline=layers, virtual_pipeline=2)):
        (problem,) = layout_problems(shape, TrainerConfig(ranks=parallel.pipeline, parallel=parallel))
        assert f"pipeline x virtual_pipeline is {parallel.stages}" in problem and f"{layers} layers" in problem


def test_sinks_and_experts_with_biases_are_built_in_local_layers_without_lora(tmp_path):
    shape = read_shape(write(tmp_path, "gpt_oss"))
    for field in ("tensor", "context", "expert", "expert_tensor", "pipeline"):
        parallel = ParallelConfig(**{field: 2})
        assert list(layout_problems(shape, TrainerConfig(ranks=2, parallel=parallel))) == []
    (problem,) = layout_problems(shape, TrainerConfig(layer_spec="transformer_engine", dtype="bfloat16"))
    assert problem.startswith("trainer.layer_spec is transformer_engine") and "layer_spec=local" in problem
    (problem,) = layout_problems(shape, TrainerConfig(lora=LoraConfig(rank=4)))
    assert problem.startswith("trainer.lora.rank is 4") and "rank=0" in problem


def test_gated_delta_nets_are_refused_in_layouts_that_do_not_divide_their_key_heads(tmp_path):
    shape = read_shape(write(tmp_path, "qwen3_next", layer_types=None))
    assert shape.megatron["linear_attention_freq"] == [1, 1, 1, 0]
    for parallel in (ParallelConfig(tensor=2), ParallelConfig(context=2), ParallelConfig(pipeline=2)):
        assert list(layout_problems(shape, TrainerConfig(ranks=2, parallel=parallel))) == []
    (problem,) = layout_problems(shape, TrainerConfig(ranks=4, parallel=ParallelConfig(tensor=2, context=2)))
    assert problem.startswith("trainer.parallel.tensor x context is 4") and "2 key heads" in problem
    (problem,) = layout_problems(shape, TrainerConfig(layer_spec="transformer_engine", dtype="bfloat16"))
    assert problem.startswith("trainer.layer_spec is transformer_engine") and "layer_spec=local" in problem
    (problem,) = layout_problems(shape, TrainerConfig(lora=LoraConfig(rank=4)))
    assert problem.startswith("trainer.lora.rank is 4") and "rank=0" in problem


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
        {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2},
        {"truncate": False},
        {"factor": 2.0, "original_max_position_embeddings": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_moe"])
def test_yarn_angles_equal_those_of_transformers(tmp_path, family, fields):
    rope = {**YARN, **fields, **({"partial_rotary_factor": 0.5} if family == "glm4_moe" else {})}
    config = tiny_models.tiny_config(family, rope_parameters=rope)
    config.save_pretrained(tmp_path)
    theirs, amplitude = modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)
    ours = read_shape(tmp_path).rope
    # A power of the base: the rounding of its exponent is multiplied by the logarithm of the base.
    rtol = numerics.FACTOR * numerics.EPSILON * math.log(rope["rope_theta"])
    torch.testing.assert_close(ours.frequencies(), theirs, rtol=rtol, atol=0.0)
    assert ours.amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize("fields", [{}, {"factor": 32.0, "low_freq_factor": 2.0, "rope_theta": 1e4}], ids=str)
def test_llama3_angles_equal_those_of_transformers(tmp_path, fields):
    config = tiny_models.llama_config(rope_parameters={**LLAMA3, **fields})
    config.save_pretrained(tmp_path)
    theirs, amplitude = modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config)
    ours = read_shape(tmp_path).rope
    rtol = numerics.FACTOR * numerics.EPSILON * math.log(ours.base)
    torch.testing.assert_close(ours.frequencies(), theirs, rtol=rtol, atol=0.0)
    assert ours.amplitude == amplitude


def test_llama3_rope_of_old_configs_is_read_too(tmp_path):
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    folder = write(tmp_path, "llama", rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)
    rope = read_shape(folder).rope
    assert rope.base == 5e5
    assert rope.scaling == RopeScaling(factor=8.0, original_length=1024, slow=1.0, fast=4.0, by_rotations=True)


def test_rope_of_old_configs_is_read_too(tmp_path):
    folder = write(
        tmp_path,
        "deepseek_v3",
        rope_parameters=None,
        rope_theta=5000.0,
        rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0},
    )
    shape = read_shape(folder)
    assert shape.rope.base == 5000.0
    assert shape.rope.dim == 64
    assert shape.rope.scaling is not None
    assert shape.megatron["softmax_scale"] == pytest.approx((0.1 * 3.6888794541 + 1) ** 2 / 192**0.5)
