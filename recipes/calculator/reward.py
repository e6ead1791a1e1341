"""1 for the exact answer in the exact format, else 0."""

from __future__ import annotations

from agent_loop.loop import Prompt
from agent_loop.reward import Completion
from message_queue.tokens import StopReason


def answer_text(answer: str) -> str:
    """The last turn that earns the reward."""
    return f"<answer>{answer}</answer>"


class ExactAnswer:
    """A Reward: the last turn is the answer, nothing else, and the model ended it."""

    async def score(self, prompt: Prompt, *, completion: Completion) -> float:
        """0.0 or 1.0."""
        if completion.stop_reason is not StopReason.STOP or not completion.turns:
            return 0.0
        return float(completion.turns[-1] == answer_text(prompt.target["answer"]))
