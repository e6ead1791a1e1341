"""An agent of openai-agents with a tool; API is `responses` or `chat`; base URL and key come from the environment."""

import json
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api(sys.argv[1])


@function_tool
def add(x: int, y: int) -> str:
    """Adds two numbers."""
    return str(x + y)


prompt = json.load(sys.stdin)
agent = Agent(name="calculator", instructions="Add.", tools=[add], model=os.environ["MODEL"])
answer = Runner.run_sync(agent, prompt["messages"][-1]["content"])
print(float(answer.final_output == prompt["target"]["answer"]))
