"""Reads sampled turns: text, reasoning and tool calls. The package `renderers` reads formats other than Qwen3's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_loop.control_tokens import Tokenizer
from agent_loop.programs.conversation import arguments_text
from agent_loop.programs.session import ReadTurn, TurnReader
from agent_loop.tools.tool import (
    MARKERS,
    THINK,
    MalformedCall,
    ToolCall,
    TurnParts,
    checked_call,
    opened_reasoning,
    split_turn,
)
from message_queue.tokens import Int32Array

TOOL_PARSERS = {"glm4_moe": "glm", "deepseek_v3": "deepseek-v3"}
"""Model family -> parser; other families write calls as Qwen3 does: `<tool_call>{"name": ..., "arguments": ...}`."""


def turn_reader(tokenizer: Tokenizer, *, family: str) -> TurnReader:
    """The reader of a model's turns. A call that is not well formed stays in the text.

    Args:
        family: `model_type` of the checkpoint's config.
    """
    split = _renderers_split(tokenizer, family) if family in TOOL_PARSERS else _split(tokenizer)

    def read(turn: Int32Array, observation: Int32Array) -> ReadTurn:
        before = tokenizer.decode(observation[-16:].tolist(), skip_special_tokens=False)  # with an opened reasoning
        reasoning, content, found = split(turn, opened_reasoning(before))
        calls = list[tuple[str, str]]()
        for call, text in found:
            if isinstance(call, ToolCall) and call.name:
                calls.append((call.name, arguments_text(call.arguments)))
            else:
                content += text
        return ReadTurn(content, (reasoning or "").replace(THINK, "") or None, tuple(calls))

    return read


def _split(tokenizer: Any) -> Callable[[Int32Array, str], TurnParts]:
    hides = not MARKERS & set(getattr(tokenizer, "all_special_tokens", ()))
    return lambda turn, opened: split_turn(opened + tokenizer.decode(turn.tolist(), skip_special_tokens=hides))


def _renderers_split(tokenizer: Any, family: str) -> Callable[[Int32Array, str], TurnParts]:
    import renderers  # takes seconds to import, and few runs have a program  # pyright: ignore[reportMissingTypeStubs]
    from renderers.base import ToolCallParseStatus  # pyright: ignore[reportMissingTypeStubs]

    config = renderers.DefaultRendererConfig(tool_parser=TOOL_PARSERS[family], reasoning_parser="think")
    renderer = renderers.create_renderer(tokenizer, config)  # pyright: ignore[reportUnknownMemberType]

    def split(turn: Int32Array, opened: str) -> TurnParts:
        ids, prompt = turn.tolist(), tokenizer.encode(opened, add_special_tokens=False)
        try:
            parsed = renderer.parse_response(ids, prompt_ids=prompt)
        except (ValueError, RecursionError):  # of json: a number with too many digits, or lists in lists
            return TurnParts(None, tokenizer.decode(ids, skip_special_tokens=True), [])
        calls = list[tuple[ToolCall | MalformedCall, str]]()
        for call in parsed.tool_calls:
            start, end = call.token_span or (0, 0)
            text = tokenizer.decode(ids[start:end], skip_special_tokens=False) or call.raw
            arguments = call.arguments if isinstance(call.arguments, dict) else {}
            is_read = call.status is ToolCallParseStatus.OK
            made = checked_call({"name": call.name, "arguments": arguments}) if is_read else MalformedCall(call.status)
            calls.append((made, text))
        return TurnParts(parsed.reasoning_content, parsed.content, calls)

    return split
