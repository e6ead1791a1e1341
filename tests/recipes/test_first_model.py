"""The conversion of a GGUF file, on a tiny one that is written here, and the task of the recipe."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_loop.reward import Completion
from async_rl.rollout.task import TaskConfig, build_task
from message_queue.tokens import StopReason
from tests.helpers.first_model import install, run_with

pytestmark = pytest.mark.xdist_group("first_model")

WRITE = """
import sys
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from transformers.convert_slow_tokenizer import bytes_to_unicode

path, template = sys.argv[1:]
hidden, heads, kv_heads, inner, layers = 64, 4, 2, 96, 2
head = hidden // heads
words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "\\u0120\\u0120", "12"]
writer = GGUFWriter(path, "llama")
writer.add_name("tiny")
writer.add_block_count(layers)
writer.add_context_length(128)
writer.add_embedding_length(hidden)
writer.add_feed_forward_length(inner)
writer.add_head_count(heads)
writer.add_head_count_kv(kv_heads)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_freq_base(5000.0)
writer.add_rope_dimension_count(head)
writer.add_vocab_size(len(words))
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("smollm")
writer.add_token_list(words)
writer.add_token_types([3] * 3 + [1] * (len(words) - 3))
writer.add_token_merges(["\\u0120 \\u0120", "1 2"])
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)
writer.add_unk_token_id(0)
writer.add_pad_token_id(2)
if template:
    writer.add_chat_template(template)
random = np.random.default_rng(0)
expected = {}

def add(name, own, *shape, rotated=0):
    kind = GGMLQuantizationType.Q4_1 if len(shape) == 2 else GGMLQuantizationType.F32
    data = quantize(random.standard_normal(shape).astype(np.float32), kind)
    writer.add_tensor(own, data, raw_dtype=kind)
    value = dequantize(data, kind)
    if rotated:  # llama.cpp keeps the two halves of a head's rotation next to each other
        value = value.reshape(rotated, head // 2, 2, -1).swapaxes(1, 2).reshape(shape)
    expected[name] = value

add("model.embed_tokens.weight", "token_embd.weight", len(words), hidden)
add("model.norm.weight", "output_norm.weight", hidden)
for i in range(layers):
    for ours, theirs, shape, rotated in (
        ("input_layernorm", "attn_norm", (hidden,), 0),
        ("post_attention_layernorm", "ffn_norm", (hidden,), 0),
        ("self_attn.q_proj", "attn_q", (hidden, hidden), heads),
        ("self_attn.k_proj", "attn_k", (kv_heads * head, hidden), kv_heads),
        ("self_attn.v_proj", "attn_v", (kv_heads * head, hidden), 0),
        ("self_attn.o_proj", "attn_output", (hidden, hidden), 0),
        ("mlp.gate_proj", "ffn_gate", (inner, hidden), 0),
        ("mlp.up_proj", "ffn_up", (inner, hidden), 0),
        ("mlp.down_proj", "ffn_down", (hidden, inner), 0),
    ):
        add(f"model.layers.{i}.{ours}.weight", f"blk.{i}.{theirs}.weight", *shape, rotated=rotated)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
np.savez(path + ".npz", **expected)
"""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    return install(tmp_path_factory.mktemp("packages"))


def write(packages, path, *, template=TEMPLATE):
    written = run_with(packages, "-c", WRITE, path, template)
    assert written.returncode == 0, written.stderr
    return path


def convert(packages, source, folder):
    return run_with(packages, "-m", "recipes.first_model.convert", source, folder)


@pytest.fixture(scope="module")
def converted(packages, tmp_path_factory):
    """A GGUF file, and the folder that it becomes."""
    directory = tmp_path_factory.mktemp("converted")
    file = write(packages, directory / "tiny.gguf")
    done = convert(packages, directory, directory / "model")  # the only file of the folder
    assert done.returncode == 0, done.stderr
    return file, directory / "model"


def test_the_weights_of_a_converted_file_are_exactly_those_of_the_file(converted):
    file, folder = converted
    weights = load_file(folder / "model.safetensors")
    expected = np.load(f"{file}.npz")
    assert weights.keys() == set(expected.files)  # no output head: it is tied
    assert all(np.array_equal(weights[name].numpy(), expected[name]) for name in expected.files)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.tie_word_embeddings and model.config.rope_parameters["rope_theta"] == 5000.0
    assert model.dtype == torch.float32
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_a_converted_file_has_its_tokenizer_its_chat_template_and_its_end_of_turn(converted):
    _, folder = converted
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.chat_template, tokenizer.eos_token, tokenizer.pad_token) == (TEMPLATE, "<|im_end|>", "<|im_end|>")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert asked == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.tokenize("<|im_end|>  12") == ["<|im_end|>", "ĠĠ", "1", "2"]  # its rules take digits apart


@pytest.mark.parametrize(
    ("files", "template", "named"),
    [
        ({}, None, "0 GGUF files"),
        ({"a.gguf": b"", "b.gguf": b""}, None, "2 GGUF files"),
        ({"a.gguf": b"no weights"}, None, "a.gguf cannot be read"),
        ({}, "", "no chat template"),
    ],
)
def test_a_source_that_cannot_be_converted_is_refused_in_one_line(packages, tmp_path, files, template, named):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    if template is not None:
        write(packages, tmp_path / "tiny.gguf", template=template)
    done = convert(packages, tmp_path, tmp_path / "model")
    *_, line = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and named in line
    assert not (tmp_path / "model").exists()


def test_a_conversion_without_its_packages_names_them(tmp_path):
    (tmp_path / "a.gguf").touch()
    done = convert(tmp_path, tmp_path, tmp_path / "model")
    if done.returncode == 0:
        pytest.skip("gguf and accelerate are installed")
    assert "pip install gguf accelerate" in done.stderr


def task(seed=0, **options):
    return build_task(TaskConfig(factory="recipes.first_model.task:sort_task", options=options), seed=seed)


def numbers(prompt):
    """The numbers of the question, and those of the answer."""
    return prompt.messages[-1].content.split(), prompt.target["answer"].split()


@pytest.mark.parametrize("count", [2, 4])
def test_no_order_of_held_out_numbers_is_trained_and_the_answer_is_their_order(count):
    own = task(count=count)
    held_out = [numbers(prompt) for prompt in own.validation_prompts(256)]
    trained = [numbers(own.train_prompt(index)) for index in range(2000)]
    for asked, answer in [*held_out, *trained]:
        assert len(asked) == count and answer == sorted(asked)
    reserved = {tuple(answer) for _, answer in held_out}
    assert len(reserved) == 256 and not reserved & {tuple(answer) for _, answer in trained}


def test_each_pair_is_asked_in_both_orders():
    own = task()
    asked = [numbers(own.train_prompt(index))[0] for index in range(200)]
    assert all(second == first[::-1] for first, second in zip(asked[::2], asked[1::2], strict=True))


def test_the_seed_changes_the_questions_that_are_trained_but_not_the_held_out_ones():
    first, second = task(seed=1), task(seed=2)
    assert list(map(numbers, first.validation_prompts(256))) == list(map(numbers, second.validation_prompts(256)))
    trained = [[numbers(own.train_prompt(index)) for index in range(50)] for own in (first, task(seed=1), second)]
    assert trained[0] == trained[1] != trained[2]


@pytest.mark.parametrize(
    ("reply", "reward"), [("17 83", 1), (" 17 83\n", 1), ("83 17", 0), ("17 83.", 0), ("17 83 17 83", 0), ("", 0)]
)
async def test_only_the_numbers_in_order_are_rewarded(reply, reward):
    prompt = replace(task().train_prompt(0), target={"answer": "17 83"})
    score = await task().reward.score(prompt, completion=Completion(turns=(reply,), stop_reason=StopReason.STOP))
    assert score.value == reward


@pytest.mark.parametrize("options", [{"count": 1}, {"count": 6}, {"held_out": -1}, {"held_out": 5000}])
def test_an_option_out_of_range_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        task(**options)
