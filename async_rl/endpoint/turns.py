"""Reads sampled turns: text, reasoning and tool calls, by the parsers of the package `renderers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agent_loop.control_tokens import Tokenizer
from agent_loop.session import ReadTurn, TurnReader
from message_queue.tokens import Int32Array

THINK = "<think>"  # opens the reasoning, in the answer or at the end of the prompt
TOOL_PARSERS = {"glm4_moe": "glm", "deepseek_v3": "deepseek-v3"}
"""Model family -> parser; other families write calls as Qwen3 does: `<tool_call>{"name": ..., "arguments": ...}`."""


def turn_reader(tokenizer: Tokenizer, *, family: str) -> TurnReader:
    """The reader of a model's turns. A call that is not well formed stays in the text.

    Args:
        family: `model_type` of the checkpoint's config.
    """
    from renderers import DefaultRendererConfig, create_renderer  # takes seconds to import, and few runs have a program
    from renderers.base import ToolCallParseStatus

    config: Any = DefaultRendererConfig(tool_parser=TOOL_PARSERS.get(family, "qwen3"), reasoning_parser="think")
    renderer = create_renderer(tokenizer, config)  # type: ignore[arg-type]
    ends = renderer.get_stop_token_ids()

    def read(turn: Int32Array, observation: Int32Array) -> ReadTurn:
        ids, prompt = turn.tolist(), _after_last(ends, observation)
        opens = THINK in str(tokenizer.decode(prompt, skip_special_tokens=False))
        parsed = renderer.parse_response(ids, prompt_ids=prompt if opens else None)
        content, calls = parsed.content, list[tuple[str, str]]()
        for call in parsed.tool_calls:
            if call.status is ToolCallParseStatus.OK and call.name is not None:
                arguments = call.arguments if isinstance(call.arguments, dict) else {}
                calls.append((call.name, json.dumps(arguments, ensure_ascii=False)))
            else:
                start, end = call.token_span or (0, 0)
                content += tokenizer.decode(ids[start:end], skip_special_tokens=False) or call.raw
        return ReadTurn(content, parsed.reasoning_content, tuple(calls))

    return read


def _after_last(ends: Sequence[int], observation: Int32Array) -> list[int]:
    """The tokens after the last end of a turn, where the assistant's turn starts."""
    ids = observation.tolist()
    start = next((at + 1 for at in range(len(ids) - 1, -1, -1) if ids[at] in ends), 0)
    return ids[start:]
