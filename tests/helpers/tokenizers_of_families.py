"""Tiny tokenizers with the machinery, the added tokens and the manner of chat template of the supported families."""

# ruff: noqa: RUF001 - the texts of DeepSeek's tokens

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "the tool returned an error, the user asked the assistant again and the system answered: 12 + 30 = 42.\n\n",
    "<|im_start|>user <|im_end|> <tool_call> </tool_call> <think> </think> <|user|> <|endoftext|> [gMASK] <s> </s>",
)
WORDS = Regex(r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@dataclass(frozen=True, slots=True)
class Added:
    """Texts of a tokenizer's added tokens."""

    special: Sequence[str]
    plain: Sequence[str] = ()
    normalized: bool = False
    """Of the plain ones."""


def byte_level(added: Added, template: str, *, eos: str, normalizer: Any = None, in_vocabulary: bool = False) -> Any:
    """Byte-level BPE. in_vocabulary: added tokens are words of the vocabulary, whose words need no merges."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=in_vocabulary))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+|\S+") if in_vocabulary else WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(added.special) if in_vocabulary else [],
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return finished(tokenizer, added, template, eos=eos)


def sentencepiece(template: str, *, first_only: bool) -> Any:
    """BPE over characters with a byte fallback, as in Llama-2 and Mixtral: a mark stands before the first word."""
    control = ["<unk>", "<s>", "</s>"]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    made = [f"<0x{byte:02X}>" for byte in range(256)]
    words = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    vocabulary = {text: i for i, text in enumerate(dict.fromkeys([*control, *made, *(word for word, _ in words)]))}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, _merges_of(trained), byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    if first_only:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return finished(tokenizer, Added(control), template, eos="</s>", bos_token="<s>", unk_token="<unk>")


def unigram(template: str) -> Any:
    """Unigram over compatible characters, with markers that are pieces too and are found after normalisation."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((chr(code), -5.0) for code in range(32, 127)), ("▁", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    added = Added(("<unk>", "<s>", "</s>"), ("<tool_call>",), normalized=True)
    return finished(tokenizer, added, template, eos="</s>", unk_token="<unk>")


def finished(tokenizer: Tokenizer, added: Added, template: str, *, eos: str, **fields: str) -> Any:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in added.special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=added.normalized) for text in added.plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        chat_template=template,
        **fields,
    )


def _merges_of(tokenizer: Tokenizer) -> Any:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


QWEN_TEMPLATE = """\
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- set reply = m.content.startswith('<tool_response>') and m.content.endswith("</tool_response>") %}
    {%- if m.role == 'user' and not reply %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thoughts %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thoughts + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

MISTRAL_TEMPLATE = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
    {%- else %}{{- ' [INST] ' + m.content | trim + ' [/INST]' }}{% endif %}
{%- endfor %}"""

DEEPSEEK_TEMPLATE = """\
{%- set ns = namespace(system='') %}
{%- for m in messages %}
    {%- if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{% endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{- '<｜User｜>' + m['content'] }}
    {%- elif m['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}
    {%- elif m['role'] == 'assistant' %}
        {%- set content = m['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>', 1)[1] %}{% endif %}
        {{- '<｜Assistant｜></think>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜></think>' }}{% endif %}"""

GLM_TEMPLATE = """\
[gMASK]<sop>
{%- macro visible(content) %}{% if content is string %}{{- content }}{% endif %}{% endmacro %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- set content = visible(m.content) %}
        {%- if '</think>' in content %}
            {%- set thoughts = ((content.split('</think>') | first).rstrip('\\n').split('<think>') | last).strip() %}
            {%- set content = (content.split('</think>') | last).lstrip('\\n') %}
        {%- endif %}
        {{- '<|assistant|>\\n<think>' + thoughts + '</think>\\n' + content.strip() }}
    {%- elif m.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + m.role + '|>\\n' + visible(m.content) }}
        {{- '/nothink' if m.role == 'user' and not visible(m.content).endswith('/nothink') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""

LLAMA_TEMPLATE = """\
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

OLMO_TEMPLATE = """\
{{- eos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- '<|assistant|>\\n' + m.content + eos_token + '\\n' }}
    {%- else %}{{- '<|' + m.role + '|>\\n' + m.content + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}"""

PLAIN_TEMPLATE = """\
{%- for m in messages %}{{- '<s>' + m.role + ': ' + m.content + '</s>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<s>assistant: <tool_call>' }}{% endif %}"""

QWEN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
GLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
DEEPSEEK_TAGS = (
    *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    *("<think>", "</think>"),
)


def build(family: str) -> Any:
    """The tokenizer of a family."""
    match family:
        case "qwen":
            added = Added(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), QWEN_TAGS)
            return byte_level(added, QWEN_TEMPLATE, eos="<|im_end|>", normalizer=normalizers.NFC())
        case "mixtral":
            return sentencepiece(MISTRAL_TEMPLATE, first_only=False)
        case "mixtral, later":
            return sentencepiece(MISTRAL_TEMPLATE, first_only=True)
        case "deepseek":
            added = Added(("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), DEEPSEEK_TAGS)
            tokenizer = byte_level(added, DEEPSEEK_TEMPLATE, eos="<｜end▁of▁sentence｜>")
            tokenizer.bos_token = "<｜begin▁of▁sentence｜>"
            return tokenizer
        case "glm":
            added = Added(("<|endoftext|>", "[gMASK]", "<sop>", *GLM_ROLES), QWEN_TAGS)
            return byte_level(added, GLM_TEMPLATE, eos="<|endoftext|>")
        case "olmo":
            added = Added(("<|endoftext|>", "|||IP_ADDRESS|||"), tuple(" " * n for n in range(2, 9)), normalized=True)
            return byte_level(added, OLMO_TEMPLATE, eos="<|endoftext|>", normalizer=normalizers.NFC())
        case "llama":
            added = Added(("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"))
            return byte_level(added, LLAMA_TEMPLATE, eos="<|eot_id|>", in_vocabulary=True)
        case "unigram":
            return unigram(PLAIN_TEMPLATE)
        case _:
            raise ValueError(family)


FAMILIES = ("qwen", "mixtral", "mixtral, later", "deepseek", "glm", "olmo", "llama", "unigram")
