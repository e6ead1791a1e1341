"""An agent of LangGraph with a tool; API is `openai` or `anthropic`; base URL and key come from the environment."""

import json
import os
import sys

from langgraph.prebuilt import create_react_agent


def add(x: int, y: int) -> str:
    """Adds two numbers."""
    return str(x + y)


def model():
    if sys.argv[1] == "openai":
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(model=os.environ["MODEL"])
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model=os.environ["MODEL"])


prompt = json.load(sys.stdin)
result = create_react_agent(model(), [add]).invoke({"messages": prompt["messages"]})
print(float(result["messages"][-1].text.strip() == prompt["target"]["answer"]))
