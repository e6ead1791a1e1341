"""An agent of smolagents with a tool; base URL and key come from the environment."""

import json
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(x: int, y: int) -> str:
    """Adds two numbers.

    Args:
        x: first number.
        y: second number.
    """
    return str(x + y)


prompt = json.load(sys.stdin)
model = OpenAIServerModel(os.environ["MODEL"], os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[add], model=model, max_steps=4, verbosity_level=0)
answer = agent.run(prompt["messages"][-1]["content"])
print(float(str(answer) == prompt["target"]["answer"]))
