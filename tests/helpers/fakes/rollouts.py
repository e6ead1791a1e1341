"""The calls of a publisher to rollouts, without any rollouts."""

from agent_loop.tools.tool import PauseGate


class RolloutsHere:
    """Rollouts that are all in this process."""

    def __init__(self, gate: PauseGate | None = None) -> None:
        self.gate = gate or PauseGate()
        self.avoided = frozenset()

    async def pause(self):
        self.gate.pause()

    async def resume(self):
        self.gate.resume()

    async def avoid(self, replicas):
        self.avoided = frozenset(replicas)
