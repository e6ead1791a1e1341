"""A rollout of a task, on a fake engine."""

from agent_loop.engine import SamplingConfig
from agent_loop.tools.tool import PauseGate
from message_queue.trajectory import Trajectory
from tests.helpers.fakes import SPEC


async def roll_task(task, engine, *, tokenizer, limits, prompt=None, trajectory=None):
    """The trajectory of a prompt, by default of the first one."""
    trajectory = Trajectory(routing=SPEC) if trajectory is None else trajectory
    loop = task.build_loop(
        engine=engine, tokenizer=tokenizer, sampling=SamplingConfig(), limits=limits, gate=PauseGate()
    )
    await loop.run(prompt or task.train_prompt(0), trajectory=trajectory, session="s", cache_salt="v0")
    return trajectory
