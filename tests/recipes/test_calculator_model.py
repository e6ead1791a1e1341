import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from async_rl.weights.model_info import read_model_info
from recipes.calculator.model import TinyModelConfig, save_initial_checkpoint
from recipes.calculator.task import CalculatorConfig, CalculatorTask
from recipes.calculator.tokenizer import build_tokenizer


def tensors(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "new" / "folder"
    CalculatorTask(CalculatorConfig(), seed=7).save_initial_checkpoint(folder)
    return folder


def test_the_model_has_919168_float32_parameters(checkpoint):
    held = tensors(checkpoint)
    assert sum(t.numel() for t in held.values()) == 919_168
    assert {t.dtype for t in held.values()} == {torch.float32}
    assert held["model.layers.3.mlp.experts.7.down_proj.weight"].shape == (128, 64), "experts are one tensor each"


def test_transformers_loads_every_tensor_of_the_model(checkpoint):
    held = tensors(checkpoint)
    model, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    fused = model.state_dict()["model.layers.2.mlp.experts.gate_up_proj"][5]
    gate, up = (held[f"model.layers.2.mlp.experts.5.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(fused, torch.cat([gate, up]))
    logits = model(torch.arange(10)[None]).logits
    assert logits.shape == (1, 10, 117) and torch.isfinite(logits).all()


def test_the_run_reads_the_routed_layers_from_the_checkpoint(checkpoint):
    info = read_model_info(checkpoint)
    assert (info.family, info.vocab_size, info.context_length) == ("qwen3_moe", 117, 1024)
    assert info.routing is not None
    assert (info.routing.layers, info.routing.num_experts, info.routing.top_k) == ((1, 2, 3), 8, 2)
    fields = json.loads((checkpoint / "config.json").read_text())
    assert (fields["num_experts"], fields["rope_theta"]) == (8, 1000.0), "the names of older versions are there too"


def test_weights_of_the_model_depend_on_its_seed_only(checkpoint, tmp_path):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for seed in (7, 8):
        CalculatorTask(CalculatorConfig(), seed=seed).save_initial_checkpoint(tmp_path / str(seed))
    assert torch.equal(torch.get_rng_state(), before)
    same, other, reference = tensors(tmp_path / "7"), tensors(tmp_path / "8"), tensors(checkpoint)
    assert all(torch.equal(same[name], reference[name]) for name in reference)
    assert not torch.equal(other["lm_head.weight"], reference["lm_head.weight"])


def test_a_model_without_a_dense_layer_routes_in_every_layer(tmp_path):
    CalculatorTask(CalculatorConfig(dense_first_layer=False), seed=0).save_initial_checkpoint(tmp_path)
    info = read_model_info(tmp_path)
    assert info.routing is not None and info.routing.layers == (0, 1, 2, 3)


def test_the_size_of_the_model_follows_its_config(tmp_path):
    small = TinyModelConfig(hidden_size=32, num_layers=2, head_dim=8, num_experts=4)
    save_initial_checkpoint(tmp_path, tokenizer=build_tokenizer(), seed=0, config=small)
    assert sum(t.numel() for t in tensors(tmp_path).values()) < 70_000
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_experts == 4


@pytest.mark.parametrize(
    ("options", "field"),
    [({"num_layers": 1}, "num_layers"), ({"top_k": 9}, "top_k"), ({"num_kv_heads": 3}, "num_heads")],
)
def test_a_bad_size_of_the_model_is_refused_by_field(options, field):
    with pytest.raises(ValueError, match=rf"model\.{field}"):
        TinyModelConfig(**options)
