"""An environment behind a server of OpenEnv, over one connection for each rollout."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import count
from typing import Any

from agent_loop.environment import Step
from agent_loop.loop import Message, Prompt
from async_rl.rollout.task import Task

FIRST_TRAINED = 1_000_000  # seeds before it are held out


class OpenEnvironment:
    """A session at a server; see `agent_loop.environment`.

    Args:
        url: server address.
        action: field of the action that gets the text of a turn.
        observation: field of the observation that the model sees; None shows all as JSON.
    """

    def __init__(self, url: str, action: str, observation: str | None) -> None:
        self._client: Any = import_module("openenv.core.generic_client").GenericEnvClient(url)
        self._action = action
        self._observation = observation

    async def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        """Connect and start."""
        await self._client.connect()
        result = await self._client.reset(seed=seed)
        return [*prompt.messages, self._seen(result.observation)]

    async def step(self, text: str) -> Step:
        """One step."""
        result = await self._client.step({self._action: text})
        return Step(messages=[self._seen(result.observation)], reward=float(result.reward or 0), done=result.done)

    async def close(self) -> None:
        """Disconnect; this ends the session at the server."""
        await self._client.close()

    def _seen(self, observation: Mapping[str, Any]) -> Message:
        shown = observation if self._observation is None else observation.get(self._observation)
        return Message(role="user", content=shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False))


class RepeatableEnvironment(OpenEnvironment):
    """A session whose reset and steps always have the same answers."""

    repeatable = True


def openenv_task(
    *,
    url: str = "http://127.0.0.1:8000",
    prompt: str = "You are in an environment. Your whole message is your action.",
    action: str = "message",
    observation: str | None = None,
    repeatable: bool = False,
) -> Task:
    """The task of `--recipe openenv`.

    Args:
        url: server address.
        prompt: first message of each rollout. Rollouts of one row have the same seed; rows have different ones.
        action: field of the action that gets the text of a turn.
        observation: field of the observation that the model sees; None shows all as JSON.
        repeatable: whether the same seed and turns always have the same answers.

    Raises:
        ValueError: the package is absent.
    """
    try:
        import_module("openenv.core.generic_client")
    except ImportError as error:
        raise ValueError(f"openenv-core cannot be imported ({error}); pip install 'async-rl[openenv]'") from error
    kind = RepeatableEnvironment if repeatable else OpenEnvironment

    def rows(first: int) -> Iterator[dict[str, Any]]:
        return ({"prompt": prompt, "seed": seed} for seed in count(first))

    return Task(
        prompts=lambda seed: rows(FIRST_TRAINED * (1 + seed)),  # pyright: ignore[reportUnknownLambdaType]
        validation=lambda: rows(0),
        environment=functools.partial(kind, url, action, observation),
    )
