"""A tokenizer of 117 ids: control tokens, tags, single ASCII characters and pieces of a tool call."""

from __future__ import annotations

import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, TURN_START, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (PAD, TURN_START, END_OF_TURN)
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>")
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))
PIECES = (
    *("user", "assistant", "calculator", "arguments", "expression", "name", "error"),
    *('{"', '": "', '", "', '": {"', '"}}'),
)
VOCABULARY = (*CONTROL, *TAGS, *CHARACTERS, *PIECES)

# Consecutive tool replies share one user turn. The template appends only, so a sampled turn can be continued.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a Hugging Face fast tokenizer. Characters outside ASCII become a space.

    `<answer>42</answer>` has 4 tokens: two tags and two digits.
    """
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=" "))
    longest_first = sorted(PIECES, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) + r"|[\s\S]"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    return with_chat_template(tokenizer)


def with_chat_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The Hugging Face tokenizer of a vocabulary that has the control tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
