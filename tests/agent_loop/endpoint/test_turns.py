"""Sampled turns as HTTP agents see them: the calls of the agent loop's parser, and valid JSON in every family."""

import numpy as np
import pytest

from agent_loop.programs.endpoint.turns import turn_reader
from tests.helpers import tokenizers_of_families
from tests.helpers.tokenizers_of_families import Added

QWEN = tokenizers_of_families.build("qwen")
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'


def read(text, *, before="<|im_start|>assistant\n", tokenizer=QWEN, family="qwen3_moe"):
    turn, observation = (
        np.asarray(tokenizer.encode(each, add_special_tokens=False), np.int32) for each in (text, before)
    )
    return turn_reader(tokenizer, family=family)(turn, observation)


@pytest.mark.parametrize(
    ("text", "before", "reasoning", "content", "calls"),
    [
        (f"<think>\nhm {CALL}</think>\n\nso {CALL}<|im_end|>", "", f"\nhm {CALL}", "\n\nso ", 1),
        (f"hm {CALL}</think>so {CALL}<|im_end|>", "<think>\n", f"hm {CALL}", "so ", 1),
        (f"hm {CALL}<|im_end|>", "<think>\n", f"hm {CALL}", "", 0),
        (f"<think>hm {CALL}", "", f"hm {CALL}", "", 0),
        (f"so {CALL}{CALL} end<|im_end|>", "<think>\n\n</think>\n\n", None, "so ", 2),
        ("<think></think>so<|im_end|>", "", None, "so", 0),
    ],
)
def test_reasoning_text_and_calls_of_a_turn(text, before, reasoning, content, calls):
    found = read(text, before=f"<|im_start|>assistant\n{before}")
    assert (found.reasoning, found.content, found.calls) == (reasoning, content, (("add", '{"x": 1}'),) * calls)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e400", "9" * 5000, "[" * 500 + "]" * 500])
def test_a_call_without_valid_json_stays_in_the_text(value):
    call = f'<tool_call>{{"name": "add", "arguments": {{"x": {value}}}}}</tool_call>'
    found = read(f"so {call}<|im_end|>")
    assert (found.content, found.calls) == (f"so {call}", ())


def test_names_and_arguments_are_safe_text():
    call = r'<tool_call>{"name": "a\ud83d", "arguments": {"\udc00": "\ud83d\ude00"}}</tool_call>'
    assert read(f"{call}<|im_end|>").calls == (("a\ufffd", '{"\ufffd": "😀"}'),)


GLM_TAGS = tuple(f"<{end}{name}>" for name in ("arg_key", "arg_value", "tool_call", "think") for end in ("", "/"))


@pytest.mark.parametrize(
    ("value", "calls"),
    [
        (r'"smile \ud83d"', (("add", '{"x": "smile \ufffd"}'),)),
        ("3", (("add", '{"x": 3}'),)),
        ("NaN", ()),
        ("9" * 5000, ()),
        ("[" * 2000, ()),
        ("[" * 300 + "]" * 300, ()),
    ],
)
def test_calls_of_another_family_are_safe_too(value, calls):
    added = Added(("<|endoftext|>", "<|user|>", "<|assistant|>"), GLM_TAGS)
    tokenizer = tokenizers_of_families.byte_level(added, tokenizers_of_families.GLM_TEMPLATE, eos="<|endoftext|>")
    call = f"<tool_call>add<arg_key>x</arg_key><arg_value>{value}</arg_value></tool_call>"
    found = read(f"so {call}<|endoftext|>", before="<|assistant|>", tokenizer=tokenizer, family="glm4_moe")
    assert found.calls == calls and found.content.startswith("so ")
    assert calls or value in found.content
