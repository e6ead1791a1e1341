"""Environments of the package skyrl-gym. They answer each turn of the model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from agent_loop.environment import Step
from agent_loop.loop import Message, Prompt
from async_rl.rollout.task import Task

# Two rows for a first try; `path` names a file of others.
EXAMPLES = [
    {"prompt": "Tom has 3 bags of 14 apples. How many apples?", "reward_spec": {"ground_truth": "42"}, "max_turns": 3},
    {"prompt": "A book costs 7 dollars. How much are 12 books?", "reward_spec": {"ground_truth": "84"}, "max_turns": 3},
]


class SkyrlEnvironment:
    """One environment of skyrl-gym; see `agent_loop.environment`.

    Args:
        name: registered name.
        settings: its `env_config`.
    """

    repeatable = True  # if one is not, the loop sees other messages and starts over

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._name = name
        self._settings = dict(settings)
        self._env: Any = None

    def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Make the environment; all columns of the row are its `extras`."""
        config: Any = import_module("omegaconf").OmegaConf.create(self._settings)
        self._env = import_module("skyrl_gym").make(self._name, env_config=config, extras=dict(prompt.target))
        opening, _ = self._env.init([{"role": m.role, "content": m.content} for m in prompt.messages])
        return _messages(opening)

    def step(self, text: str) -> Step:
        """One step; its answer may lack messages."""
        answer: Any = self._env.step(text)
        return Step(messages=_messages(answer["observations"]), reward=float(answer["reward"]), done=answer["done"])

    def close(self) -> None:
        """Close it if it was made."""
        if self._env is not None:
            self._env.close()


def skyrl_gym_task(
    *,
    environment: str = "gsm8k_multi_turn",
    path: str | None = None,
    settings: Mapping[str, Any] | None = None,
    module: str | None = None,
    held_out: float = 0.5,
) -> Task:
    """The task of `--recipe skyrl_gym`.

    Args:
        environment: name under which it is registered.
        path: rows, as a source of `Task`; the columns are the `extras` of the environment. None takes two examples.
        settings: `env_config` of the environment.
        module: imported first, for a module that registers environments.
        held_out: share of the rows that is never trained on.

    Raises:
        ValueError: the package is absent, or it does not know the environment.
    """
    try:
        if module is not None:
            import_module(module)
        known: Mapping[str, Any] = import_module("skyrl_gym.envs.registration").registry
    except ImportError as error:
        raise ValueError(f"skyrl-gym cannot be imported ({error}); pip install 'async-rl[skyrl-gym]'") from error
    if environment not in known:
        raise ValueError(f"task.options.environment is {environment!r}; skyrl-gym has {', '.join(sorted(known))}")
    made = functools.partial(SkyrlEnvironment, environment, settings or {})
    return Task(prompts=path or EXAMPLES, validation=held_out, environment=made)


def _messages(found: Sequence[Mapping[str, str]]) -> list[Message]:
    return [Message(role=each["role"], content=each["content"]) for each in found]
