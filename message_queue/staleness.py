"""The bound on the age of trained tokens, in optimizer updates. `policies.py` has the behaviour at the bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Policy = Literal["wait", "drop", "recycle", "mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessConfig:
    """The staleness bound, and the policy for groups that would exceed it."""

    max_staleness: int = 1
    """Optimizer updates between the weights that sampled a token and those whose gradient is taken."""
    policy: Policy = "wait"
    """Treatment of a group that would become older. `wait`: the trainer waits for it, so nothing is given up. `drop`:
    it is given up with a reason. `recycle`: the same, and its prompt is admitted again, ahead of new ones. `mask`: it
    is trained, and its tokens that are older take no gradient."""
    max_requeues: int = 3
    """Times that a prompt is admitted again; then its group is dropped."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(
                f"staleness.max_staleness is {self.max_staleness}; must be >= 0 (0 is synchronous training)"
            )
        if self.policy not in get_args(Policy):
            raise ValueError(f"staleness.policy is {self.policy!r}; choose one of {', '.join(get_args(Policy))}")
        if self.max_requeues < 1:
            raise ValueError(
                f"staleness.max_requeues is {self.max_requeues}; must be >= 1, or give up at once with "
                "staleness.policy=drop"
            )
