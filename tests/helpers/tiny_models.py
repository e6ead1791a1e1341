"""Small Hugging Face checkpoints, made on the spot, whose routing varies from token to token.

Weights are spread wide on purpose: with the usual initial scale a router prefers the same experts for every token, and
a test of routing would pass on a constant.
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

COMMON = {
    "vocab_size": 117,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "intermediate_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
SIGMOID_EXPERTS = {
    **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    **{"first_k_dense_replace": 1, "norm_topk_prob": True},
}
ROPE = {"original_max_position_embeddings": 256, "factor": 8.0}
LLAMA3 = {**ROPE, "rope_type": "llama3", "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {**ROPE, "rope_type": "yarn", "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
LINEAR = {
    **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 24},
}
FAMILIES = {
    "llama": {"rope_parameters": LLAMA3},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen2_moe": {**QWEN_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {**QWEN_EXPERTS, "norm_topk_prob": True, "head_dim": 32},
    "qwen3_next": {
        **{**QWEN_EXPERTS, "mlp_only_layers": [], "norm_topk_prob": True, "shared_expert_intermediate_size": 96},
        **LINEAR,
    },
    "qwen3_5_text": {**LINEAR, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {
        **{**LINEAR, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        **{"shared_expert_intermediate_size": 96, "intermediate_size": None},
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
    "glm4_moe": {
        **SIGMOID_EXPERTS,
        **{"head_dim": 32, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.5},
    },
    "deepseek_v3": {
        **{**SIGMOID_EXPERTS, **LATENT, "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 64},
        **{"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
    },
    "glm4_moe_lite": {**SIGMOID_EXPERTS, **LATENT, "num_key_value_heads": 4, "q_lora_rank": 64, "rms_norm_eps": 1e-6},
    "gpt_oss": {
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 32},
        **{"sliding_window": 8, "rope_parameters": YARN},
    },
}
"""A tiny config of each family over COMMON, by its model_type: 8 experts, top-2, layer 0 dense if one can be."""


def tiny_config(family: str, **changes: Any) -> Any:
    """The tiny config of a family."""
    return transformers.AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **changes})


def has_vision(config: Any) -> bool:
    """Whether the config is that of a model with a vision tower."""
    return hasattr(config, "vision_config")


qwen2_config = partial(tiny_config, "qwen2")
qwen2_moe_config = partial(tiny_config, "qwen2_moe")
qwen3_dense_config = partial(tiny_config, "qwen3")
qwen3_moe_config = partial(tiny_config, "qwen3_moe")
qwen3_next_config = partial(tiny_config, "qwen3_next")
llama_config = partial(tiny_config, "llama")
mixtral_config = partial(tiny_config, "mixtral")
olmoe_config = partial(tiny_config, "olmoe")
glm4_moe_config = partial(tiny_config, "glm4_moe")
deepseek_v3_config = partial(tiny_config, "deepseek_v3")
gpt_oss_config = partial(tiny_config, "gpt_oss")


def with_vision(family: str, **changes: Any) -> Any:
    """The tiny config of a family as the text part of a model with a vision tower."""
    text = tiny_config(family, **changes).to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": text["hidden_size"], "num_position_embeddings": 16}
    outer = {"tie_word_embeddings": text["tie_word_embeddings"], "vision_config": vision}
    return transformers.AutoConfig.for_model(family.removesuffix("_text"), text_config=text, **outer)


def spread_model(config: Any, *, seed: int, vectors: bool = False) -> Any:
    """A float32 model of `config` with wide random weights; `vectors`: norms and biases are random too."""
    torch.manual_seed(seed)
    auto = transformers.AutoModelForImageTextToText if has_vision(config) else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0, 1.5)  # as large as scores
            elif name.endswith("gate_up_proj_bias"):
                parameter.normal_(0, 4)  # some are clamped
            elif name.endswith("A_log"):
                parameter.normal_(-2, 1)  # states last for some ten tokens
            elif parameter.ndim >= 2:
                parameter.normal_(0, _spread_of(name))
            elif vectors:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.1)
    return model.eval()


def save_checkpoint(config: Any, directory: Path, *, seed: int, vectors: bool = False) -> Path:
    """Save `spread_model(config)` as a checkpoint folder; the same seed gives the same bytes."""
    spread_model(config, seed=seed, vectors=vectors).save_pretrained(directory)
    if config.model_type.startswith("deepseek"):  # transformers 5 drops two fields that vLLM reads
        path = directory / "config.json"
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({**fields, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}))
    return directory


def add_prediction_layer(checkpoint: Path, *, repeats: bool = False) -> dict[str, torch.Tensor]:
    """Add a layer for multi-token prediction to a checkpoint of one file, as DeepSeek-V3 and GLM-4.5 have it.

    repeats: the layer predicts that the last token repeats, if its head is that of the model, as in vLLM: attention
        and experts add nothing, and the projection turns an embedding into the head's row of the same token. Otherwise
        the predictions are arbitrary.

    Returns:
        its tensors.
    """
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    last = config["num_hidden_layers"]
    weights = load_file(checkpoint / "model.safetensors")
    layer = f"model.layers.{last}."
    added = {
        name.replace(f"model.layers.{last - 1}.", layer): weight + 1
        for name, weight in weights.items()
        if name.startswith(f"model.layers.{last - 1}.")
    }
    head = torch.randn_like(weights["lm_head.weight"])
    norms = {f"{layer}{name}.weight": torch.ones(head.shape[1]) for name in ("enorm", "hnorm", "shared_head.norm")}
    added |= norms | {f"{layer}embed_tokens.weight": head, f"{layer}shared_head.head.weight": head + 1}
    size = head.shape[1]
    added[f"{layer}eh_proj.weight"] = torch.randn(size, 2 * size)
    if repeats:
        added |= {n: torch.zeros_like(w) for n, w in added.items() if n.endswith(("o_proj.weight", "down_proj.weight"))}
        embedding = weights["model.embed_tokens.weight"]
        to_head = torch.linalg.lstsq(torch.nn.functional.rms_norm(embedding, (size,)), weights["lm_head.weight"])
        added[f"{layer}eh_proj.weight"] = torch.cat([to_head.solution.T, torch.zeros(size, size)], dim=1)
        added[f"{layer}embed_tokens.weight"] = embedding.clone()
    save_file(weights | added, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return added


def add_mtp_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Add the tensors of a layer for multi-token prediction to a checkpoint of one file, as Qwen3-Next has them.

    Returns:
        its tensors.
    """
    weights = load_file(checkpoint / "model.safetensors")
    model = "model.language_model" if "model.language_model.norm.weight" in weights else "model"
    hidden = len(weights[f"{model}.norm.weight"])
    layers = f"{model}.layers."
    last = max(int(name.removeprefix(layers).split(".")[0]) for name in weights if name.startswith(layers))
    prefix = f"{layers}{last}."
    added = {
        name.replace(prefix, "mtp.layers.0."): weight + 1 for name, weight in weights.items() if name.startswith(prefix)
    }
    added["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden)
    save_file(weights | added, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return added


def quantize_fp8(checkpoint: Path, *, block: tuple[int, int] = (48, 32)) -> None:
    """Quantize the matrices of the layers of a checkpoint of one file, as DeepSeek-V3 and Qwen3-*-FP8 are shipped.

    The scales are in another file than the weights. Embeddings, head, routers, norms and biases stay unchanged.
    """
    weights = load_file(checkpoint / "model.safetensors")
    scales: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if ".layers." not in name or weight.ndim != 2 or name.endswith((".gate.weight", "embed_tokens.weight")):
            continue
        rows, columns = (torch.arange(length) // size for length, size in zip(weight.shape, block, strict=True))
        grid = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
        for i, j in itertools.product(range(grid.shape[0]), range(grid.shape[1])):
            grid[i, j] = weight[rows == i][:, columns == j].abs().max() / 448  # 448 is the largest float8
        scales[f"{name}_scale_inv"] = grid
        weights[name] = (weight.float() / grid[rows][:, columns]).to(torch.float8_e4m3fn)
    file_of = dict.fromkeys(weights, "model-1.safetensors") | dict.fromkeys(scales, "model-2.safetensors")
    (checkpoint / "model.safetensors").unlink()
    save_file(weights, checkpoint / "model-1.safetensors", metadata={"format": "pt"})
    save_file(scales, checkpoint / "model-2.safetensors", metadata={"format": "pt"})
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    path = checkpoint / "config.json"
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantized}))


def quantize_mxfp4(checkpoint: Path) -> None:
    """Quantize the experts of a gpt-oss checkpoint of one file, as it is shipped."""
    weights = load_file(checkpoint / "model.safetensors")
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat((numbers, -numbers))
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        groups = weights.pop(name).transpose(1, 2).unflatten(-1, (-1, 32))
        exponents = (groups.abs().amax(-1) / 6).log2().ceil()
        scaled = groups / exponents.exp2().unsqueeze(-1)
        nearest = (scaled.unsqueeze(-1) - numbers).abs().argmin(-1).to(torch.uint8)
        weights[f"{name}_blocks"] = nearest[..., ::2] | nearest[..., 1::2] << 4
        weights[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    path = checkpoint / "config.json"
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantized}))


def _spread_of(name: str) -> float:
    if name.endswith(("gate.weight", "router.weight")):
        return 0.5
    if name.endswith("conv1d.weight"):
        return 0.6
    return 0.15 if "lm_head" in name else 0.08
