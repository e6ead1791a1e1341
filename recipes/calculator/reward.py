"""The reward of the calculator task: 1 for the exact answer in the exact format, else 0."""

from __future__ import annotations

from agent_loop.loop import Prompt
from agent_loop.reward import Completion
from message_queue.tokens import StopReason


def answer_text(answer: str) -> str:
    """The text of a correct last turn."""
    return f"<answer>{answer}</answer>"


class ExactAnswer:
    """A Reward that requires that the model ended the last turn and that it consists of the answer only."""

    async def score(self, prompt: Prompt, *, completion: Completion) -> float:
        """1.0 for a correct answer, else 0.0."""
        if completion.stop_reason is not StopReason.STOP or not completion.turns:
            return 0.0
        return float(completion.turns[-1] == answer_text(prompt.target["answer"]))
