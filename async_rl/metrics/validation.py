"""Results of validation rounds: rollouts of held-out prompts, and the means over them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.files.atomic_dir import whole_file
from async_rl.metrics.registry import means_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRollout:
    """One rollout of a held-out prompt."""

    reward: float
    """Reward; 0 if the rollout failed."""
    tokens: int
    """Number of tokens of the root path, including prompt and tool replies."""
    cut_off: bool
    """Whether the last turn hit a token limit."""
    error: str | None
    """Error of a failed rollout; None if it finished."""
    prompt: str
    """Text of the prompt, as the chat template renders it; empty if the rollout failed before it was rendered."""
    response: str
    """Text after the prompt in the root path: turns and tool replies, with control tokens."""
    min_version: int
    """Oldest weights that sampled a token; -1 if none was sampled."""
    max_version: int
    """Newest weights that sampled a token; -1 if none was sampled."""
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    """`Trajectory.info`; empty if the rollout failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """One round over the held-out prompts.

    Rewards 1, 0 and a reward that raised, of 3 prompts: success_rate 0.5, prompts 3, failed 1.
    """

    success_rate: float
    """Mean reward of the finished rollouts; NaN if none finished."""
    prompts: int
    """Number of prompts."""
    samples: int = 1
    """Rollouts of each prompt."""
    failed: int
    """Rollouts that raised an error; excluded from `success_rate`."""
    cut_off: int
    """Finished rollouts whose last turn hit a token limit."""
    mean_tokens: float
    """Tokens per finished rollout, including prompt and tool replies; NaN if none finished."""
    min_version: int
    """Oldest weights that sampled a token; -1 if none was sampled."""
    max_version: int
    """Newest weights that sampled a token; -1 if none was sampled."""
    pass_at: Mapping[int, float] = field(default_factory=dict[int, float])
    """k -> mean pass@k of the prompts with at least k finished rollouts, NaN if there are none. k is a power of two up
    to `samples`; empty if that is 1. A rollout is right if its reward is above 0."""
    sets: Mapping[str, ValidationResult] = field(default_factory=dict[str, "ValidationResult"])
    """Name -> result over the prompts of the set; empty if the sets of the task have no names."""
    first_error: str | None = None
    """Error of the first prompt with a failed rollout."""
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    """Key of `Trajectory.info` -> mean over the finished rollouts that have the key."""

    rollouts: Mapping[str, Sequence[Sequence[ValidationRollout]]] = field(
        default_factory=dict[str, Sequence[Sequence[ValidationRollout]]]
    )
    """Name of a set -> for each prompt, its rollouts; only of the whole round."""

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts, including failed ones."""
        return self.prompts * self.samples

    def metrics(self, prefix: str = "validation/") -> dict[str, float]:
        """Key -> value, as in validation.jsonl: of the round, then of each set below `prefix` and its name."""
        plain = ("prompts", "samples", "failed", "cut_off", "mean_tokens", "min_version", "max_version")
        found = {
            "success": self.success_rate,
            **{f"pass_at_{k}": value for k, value in self.pass_at.items()},
            **{name: getattr(self, name) for name in plain},
            **{f"info/{key}": value for key, value in self.info.items()},
        }
        own = {f"{prefix}{key}": value for key, value in found.items()}
        return own | {k: v for name, each in self.sets.items() for k, v in each.metrics(f"{prefix}{name}/").items()}

    def rows(self, train_step: int) -> Iterator[dict[str, Any]]:
        """A row per rollout: step, set, number of the prompt in the set, number of the sample, and its fields.

        All rows have the same keys. `info/KEY` is None if the rollout does not have the key.
        """
        for name, prompts in self.rollouts.items():
            for number, samples in enumerate(prompts):
                for sample, rollout in enumerate(samples):
                    place = {"train_step": train_step, "set": name, "prompt_number": number, "sample": sample}
                    fields = asdict(rollout)
                    info = fields.pop("info")
                    yield place | fields | {f"info/{key}": info.get(key) for key in self.info}


def write_rollouts(path: Path, result: ValidationResult, *, train_step: int) -> None:
    """Write the rollouts of a round as JSON lines, in place of the rollouts of an earlier round.

    Raises:
        OSError: the disk has no free space or is not writable; an existing file is unchanged.
    """
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in result.rows(train_step))


def validation_result(sets: Mapping[str, Sequence[Sequence[ValidationRollout]]]) -> ValidationResult:
    """The result of a round.

    Args:
        sets: name of a set -> for each prompt, its rollouts; each prompt of the round has equally many.
    """
    whole = _result([rollouts for prompts in sets.values() for rollouts in prompts])
    return replace(whole, rollouts=sets, sets={name: _result(prompts) for name, prompts in sets.items() if name})


def pass_at(k: int, *, rollouts: int, right: int) -> float:
    """Probability that at least one of k rollouts is right, if they are drawn from `rollouts` of which `right` are.

    The unbiased estimate of Chen et al. (2021), https://arxiv.org/abs/2107.03374. Of 4 rollouts one is right:
    pass@2 is 1 - 3/6 = 0.5.
    """
    return 1 - math.comb(rollouts - right, k) / math.comb(rollouts, k)


def _result(prompts: Sequence[Sequence[ValidationRollout]]) -> ValidationResult:
    """The result over prompts, each with its rollouts."""
    everything = [rollout for rollouts in prompts for rollout in rollouts]
    finished = [[rollout for rollout in rollouts if rollout.error is None] for rollouts in prompts]
    sound = [rollout for rollouts in finished for rollout in rollouts]
    versions = [rollout for rollout in everything if rollout.max_version >= 0]
    samples = max(map(len, prompts), default=1)
    counts = [(len(rollouts), sum(rollout.reward > 0 for rollout in rollouts)) for rollouts in finished]
    return ValidationResult(
        success_rate=_mean([rollout.reward for rollout in sound]),
        prompts=len(prompts),
        samples=samples,
        failed=len(everything) - len(sound),
        cut_off=sum(rollout.cut_off for rollout in sound),
        mean_tokens=_mean([rollout.tokens for rollout in sound]),
        min_version=min((rollout.min_version for rollout in versions), default=-1),
        max_version=max((rollout.max_version for rollout in versions), default=-1),
        pass_at={
            k: _mean([pass_at(k, rollouts=n, right=right) for n, right in counts if n >= k])
            for k in (1 << power for power in range(samples.bit_length()))
            if samples > 1
        },
        first_error=next((rollout.error for rollout in everything if rollout.error is not None), None),
        info=means_of([rollout.info for rollout in sound]),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
