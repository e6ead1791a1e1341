"""A tiny Qwen3-MoE, randomly initialised, as a Hugging Face checkpoint folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelConfig:
    """Shape of the model. With the defaults and the 117 ids of the tokenizer it has 919,168 parameters."""

    hidden_size: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Decoder layers."""
    num_heads: int = 4
    """Query heads; a multiple of `num_kv_heads`."""
    num_kv_heads: int = 2
    """Key and value heads."""
    head_dim: int = 32
    """Width of a head."""
    dense_intermediate_size: int = 256
    """MLP width of a layer without experts."""
    expert_intermediate_size: int = 64
    """MLP width of an expert."""
    num_experts: int = 8
    """Experts per MoE layer."""
    top_k: int = 2
    """Experts per token."""
    rope_theta: float = 1000.0
    """Base of the rotary embedding."""
    initializer_range: float = 0.06
    """Standard deviation of the initial weights."""
    context_length: int = 1024
    """Longest sequence in tokens."""
    dense_first_layer: bool = True
    """Whether layer 0 has no experts. Set it to False for SGLang, which ignores `mlp_only_layers`."""

    def __post_init__(self) -> None:
        if self.num_layers < 1 + self.dense_first_layer:
            raise ValueError(
                f"model.num_layers is {self.num_layers} with dense_first_layer={self.dense_first_layer}; "
                "at least one layer must have experts"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"model.top_k is {self.top_k}; must be in 1..num_experts={self.num_experts}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads is {self.num_heads}; must be a multiple of num_kv_heads={self.num_kv_heads}"
            )


def save_initial_checkpoint(
    path: Path, *, tokenizer: PreTrainedTokenizerFast, seed: int, config: TinyModelConfig | None = None
) -> None:
    """Write config, float32 weights with one tensor per expert, and tokenizer into folder `path`.

    The weights depend only on `seed` and `config`. The global random state does not change.
    """
    config = config or TinyModelConfig()
    model_config = _hugging_face_config(config, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(model_config)
    path.mkdir(parents=True, exist_ok=True)
    save_file(_per_expert(model.state_dict()), path / "model.safetensors", metadata={"format": "pt"})
    _write_config(model_config, path / "config.json", rope_theta=config.rope_theta)
    tokenizer.save_pretrained(path)


def _hugging_face_config(config: TinyModelConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,  # pyright: ignore[reportCallIssue] - an undeclared field of the config
        intermediate_size=config.dense_intermediate_size,
        moe_intermediate_size=config.expert_intermediate_size,
        num_experts=config.num_experts,
        num_experts_per_tok=config.top_k,
        norm_topk_prob=True,
        mlp_only_layers=[0] if config.dense_first_layer else [],
        decoder_sparse_step=1,
        max_position_embeddings=config.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
        initializer_range=config.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _write_config(config: Qwen3MoeConfig, path: Path, *, rope_theta: float) -> None:
    """Write config.json, with the older names of two fields as well, because not every engine reads the newer names."""
    fields = config.to_diff_dict() | {"num_experts": config.num_local_experts, "rope_theta": rope_theta}
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _per_expert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split fused expert tensors into one Linear weight per expert.

    gate_up_proj [8, 128, 128] -> 8 experts with gate_proj [64, 128] and up_proj [64, 128]; down_proj [8, 128, 64] -> 8
    experts with down_proj [128, 64].
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        prefix, fused, kind = name.rpartition(".mlp.experts.")
        if not fused:
            tensors[name] = tensor.contiguous()
            continue
        for expert, weight in enumerate(tensor):
            parts = zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)
            named = parts if kind == "gate_up_proj" else [(kind, weight)]
            for projection, part in named:
                # Cloned, because safetensors refuses tensors that share memory.
                tensors[f"{prefix}.mlp.experts.{expert}.{projection}.weight"] = part.clone()
    return tensors
