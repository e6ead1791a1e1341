"""The policy losses by the name of their objective, and the baselines by theirs."""

from dataclasses import fields
from typing import get_args

from async_rl.simulator.scenario import run_config
from async_rl.trainer.batch.baselines import AdvantageConfig
from async_rl.trainer.loss.losses import LossConfig, PolicyLoss


def by_name(union):
    """Name -> class, of the classes of a config that are told apart by it."""
    classes = get_args(get_args(union)[0])
    return {kind.__dataclass_fields__["name"].default: kind for kind in classes}


_COMMON = {"name", *(field.name for field in fields(PolicyLoss))}
LOSSES, ADVANTAGES = by_name(LossConfig), by_name(AdvantageConfig)
NAMES = tuple(LOSSES)
OWN_FIELDS = {
    name: tuple(field.name for field in fields(kind) if field.name not in _COMMON) for name, kind in LOSSES.items()
}
"""Fields of each objective that are not of all objectives."""


def make_loss(name, *, bounds=None, **changes):
    """The loss `name` with `changes`, and with those of `bounds` that it has a field for."""
    return LOSSES[name](**({f: v for f, v in (bounds or {}).items() if f in OWN_FIELDS[name]} | changes))


def batch_config(*, advantage, updates=1, seed=0):
    """The config of a run whose batches have `updates` optimizer steps."""
    return run_config(
        {
            "advantage": advantage,
            "seed": seed,
            "total_train_steps": updates,
            "trainer.updates_per_batch": updates,
            "sync.every": updates,
            "staleness.max_staleness": updates,
            "rollout.groups_per_batch": 4,
        }
    )
