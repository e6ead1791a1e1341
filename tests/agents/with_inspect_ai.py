"""A task of inspect-ai with a tool; API is `openai` or `anthropic`; base URL and key come from the environment."""

import json
import os
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(x: int, y: int):
        """Adds two numbers.

        Args:
            x: first number.
            y: second number.
        """
        return str(x + y)

    return execute


prompt = json.load(sys.stdin)
sample = Sample(input=prompt["messages"][-1]["content"], target=prompt["target"]["answer"])
task = Task(dataset=[sample], solver=[use_tools(add()), generate()], scorer=match())
with tempfile.TemporaryDirectory() as folder:
    (log,) = eval(task, model=f"{sys.argv[1]}/{os.environ['MODEL']}", log_dir=folder, display="none")
assert log.status == "success", log.error
print(log.results.scores[0].metrics["accuracy"].value)
