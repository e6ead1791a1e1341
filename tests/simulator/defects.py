"""Planted defects: each takes the place of a class or a function in all modules of the product."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from async_rl.simulator.scenario import Scenario

PRODUCT = ("agent_loop", "async_rl", "message_queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A defect that the simulator must find."""

    places: tuple[tuple[Any, Any], ...]
    """(class or function of the product, its replacement)."""
    broken: tuple[str, ...]
    """Invariants that it may break; one is found broken."""
    kinds: tuple[str, ...]
    """Faults that the defect needs to show, so seeds without these need not be run."""
    agents: bool
    """Whether it shows in scenarios with agents only."""
    within: str
    """Prefix of the modules that it is planted in."""
    seed: int | None
    """A seed that finds it, tried first; of defects that take more than a few dozen seeds."""

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        for module in [m for name, m in sys.modules.items() if name.startswith((*PRODUCT,))]:
            if module.__name__.startswith(self.within):
                for whole, replacement in self.places:
                    for name in [name for name, value in vars(module).items() if value is whole]:
                        patch.setattr(module, name, replacement)

    def may_show(self, scenario: Scenario) -> bool:
        if self.agents and scenario.agent is None:
            return False
        return not self.kinds or any(fault.kind in self.kinds for fault in scenario.faults)


MUTATIONS: dict[str, Defect] = {}


def defect(
    *broken: str,
    of: Any = None,
    also: type | None = None,
    kinds: tuple[str, ...] = (),
    agents: bool = False,
    within: str = "",
    seed: int | None = None,
) -> Callable[[Any], Any]:
    """Register a subclass as a defect of its base class, or a function as one of the function `of`.

    Args:
        also: another subclass that the defect needs.
    """

    def register(made: Any) -> Any:
        places = ((of or made.__bases__[0], made), *([(also.__bases__[0], also)] if also else []))
        MUTATIONS[made.__name__] = Defect(
            places=places, broken=broken, kinds=kinds, agents=agents, within=within, seed=seed
        )
        return made

    return register
