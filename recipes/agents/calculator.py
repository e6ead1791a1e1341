"""The calculator task, solved by a program that calls the model with OpenAI's client and runs the tool itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import openai

from agent_loop.loop import Prompt
from agent_loop.programs.program import ModelAccess
from agent_loop.tools.tool import describe_tool
from message_queue.errors import ToolError
from recipes.calculator.calculator import ERROR_TEXT, Calculator
from recipes.calculator.calculator import calculate as compute
from recipes.calculator.task import CalculatorTask, calculator_task

TOOLS: Any = [describe_tool(Calculator())]


async def calculate(prompt: Prompt, access: ModelAccess) -> None:
    """Let the model call the calculator until it answers. The reward of the task scores the conversation."""
    client = _client().with_options(base_url=access.base_url, api_key=access.api_key)
    messages: list[Any] = [{"role": message.role, "content": message.content} for message in prompt.messages]
    while True:
        completion = await client.chat.completions.create(model=access.model, messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            assert call.type == "function"
            reply = _result(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": reply})


def agent_task(options: Mapping[str, Any], *, seed: int) -> CalculatorTask:
    """Build the task.

    Args:
        options: see `recipes.calculator.task.calculator_task`.
        seed: of prompts, initial weights and demonstrations.
    """
    task = calculator_task(options, seed=seed)
    task.program = calculate
    return task


def _result(arguments: str) -> str:
    try:
        return compute(json.loads(arguments).get("expression"))
    except ToolError:
        return ERROR_TEXT


@cache
def _client() -> openai.AsyncOpenAI:
    """Connections that all rollouts of this process share: a separate client for each would load certificates."""
    return openai.AsyncOpenAI(api_key="of each rollout")
