"""An agent of verifiers with its null harness, a tool server and its client of tokens; TOKENIZER is a directory."""

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from verifiers.v1.harnesses.null import NullHarnessConfig
from verifiers_task import Calculate, Sum

os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the harness starts its program with uv
os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # the tool server imports its module


async def roll(text: str, answer: str) -> float:
    client = vf.TrainClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key_var="OPENAI_API_KEY",
        renderer=Qwen3RendererConfig(),
        renderer_model_name=os.environ["TOKENIZER"],
    )
    config = vf.AgentConfig(
        harness=NullHarnessConfig(id="null"), runtime=vf.SubprocessConfig(), model=os.environ["MODEL"], client=client
    )
    async with vf.make_agent(config) as agent:
        trace = await agent.run(Calculate(Sum(idx=0, prompt=text, answer=answer)))
    if not trace.ok:
        raise RuntimeError(trace.errors)
    return trace.reward


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(asyncio.run(roll(given["messages"][-1]["content"], given["target"]["answer"])))
