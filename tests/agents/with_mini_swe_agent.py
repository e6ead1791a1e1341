"""An agent of mini-swe-agent with a shell; base URL and key come from the environment."""

import json
import os
import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

prompt = json.load(sys.stdin)
model = LitellmModel(model_name=f"openai/{os.environ['MODEL']}", cost_tracking="ignore_errors")
agent = DefaultAgent(model, LocalEnvironment(), step_limit=4, system_template="Use bash.", instance_template="{{task}}")
result = agent.run(prompt["messages"][-1]["content"])
print(float(result["submission"].strip() == prompt["target"]["answer"]))
