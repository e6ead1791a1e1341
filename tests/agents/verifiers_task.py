"""A task of verifiers with a tool server."""

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """A tool server."""

    @vf.tool
    async def add(self, x: int, y: int) -> str:
        """Adds two numbers."""
        return str(x + y)


class Sum(vf.TaskData):
    """A problem."""

    answer: str


class Calculate(vf.Task[Sum, vf.State, vf.TaskConfig]):
    """Scores the last message."""

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


if __name__ == "__main__":
    Adder.run()
