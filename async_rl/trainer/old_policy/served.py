"""Verifies the weights that replicas have served, and names what differs, from the logprobs of their tokens.

If the tokens of a replica do not fit the version that they name, they are scored under other weights, until their k3 is
within the bound:

    each other stored version               a replica that did not load the version
    the version, a part of the version      old experts, an old layer, an old head
      before for each kind of layer set
      and for each layer set
    no weights fit                          the first layer whose router, under the version, would not have chosen the
                                            experts that the engine chose: a tensor in front of this router differs

A layer set is the attention, the MLP or the experts of a layer, or a tensor outside the layers, by its name in the
checkpoint: `model.layers.3.self_attn`, `model.layers.3.mlp.experts`, `lm_head.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from async_rl.trainer.model.convert import LORA, named_tensors, numbered
from async_rl.trainer.model.families import ModelShape, weight_names
from async_rl.trainer.model.lora import adapter_names
from async_rl.trainer.old_policy.scoring import Served, VersionLogprobs, VersionScorer, served_by
from async_rl.trainer.planning import UpdatePlan
from async_rl.weights.digest import module_of
from message_queue.training_sequence import TrainingSequence

_AGREES = 0.999
"""Least share of the engine's experts that the router of a layer would choose too."""


def layer_sets(chunks: Sequence[Any], tensors: Mapping[str, Tensor], *, shape: ModelShape) -> dict[str, str]:
    """Name in `tensors` -> its layer set."""
    found: dict[int, str] = {}
    for name, weight in named_tensors(chunks):
        names_of = adapter_names if LORA in name else weight_names
        first, _ = next(numbered(name, weight, config=chunks[0].config))
        found[id(weight)] = _layer_set(names_of(shape, first).names[0])
    return {name: found[id(tensor)] for name, tensor in tensors.items() if id(tensor) in found}


def _layer_set(name: str) -> str:
    return f"{module_of(name)}.experts" if ".experts." in name else module_of(name)


class ServedWeights:
    """Looks for the weights under which a replica sampled its tokens. Collective.

    Args:
        scorer: scores tokens; its store has the versions.
        sets: see `layer_sets`.
        served: the replica and its version.
        of_version: its tokens and those of other replicas of the version.
        bound: largest accepted k3.
    """

    def __init__(
        self,
        scorer: VersionScorer,
        sets: Mapping[str, str],
        *,
        served: Served,
        of_version: VersionLogprobs,
        bound: float,
    ) -> None:
        self._scorer = scorer
        self._sets = sets
        self._served = served
        self._batch = of_version.batch
        self._bound = bound
        self._plan = self._only(of_version.plan, lambda sequence: served in map(served_by, sequence.runs))

    def name(self) -> str:
        """A sentence about the weights that fit the tokens, or about the layer in which the engine differs."""
        own = self._batch.only_update
        assert own is not None
        others = sorted(set(self._scorer.store.updates) - {own}, key=lambda update: abs(update - own))
        for update in others:
            with self._scorer.store.walk() as walk:
                walk.load(update)
                if self._fits():
                    return f"its tokens fit {self._version(update)}"
        if older := [update for update in others if update < own]:
            for name, members in self._parts():
                if self._fits_with_older(own, max(older), members):
                    return f"its tokens fit {self._version(own)} with {name} of {self._version(max(older))}"
        return self._of_routing(own)

    def _fits_with_older(self, own: int, older: int, members: frozenset[str]) -> bool:
        with self._scorer.store.walk() as walk:
            values = dict(walk.tensors(own))
            before = walk.tensors(older)
            walk.load(own, values | {name: before[name] for name, of in self._sets.items() if of in members})
            return self._fits()

    def _fits(self) -> bool:
        """Whether the tokens fit the weights that the model has now."""
        scored = self._scorer.score(self._batch, self._plan)
        k3, _ = self._scorer.k3([scored])[self._served]
        return k3 <= self._bound

    def _parts(self) -> Iterator[tuple[str, frozenset[str]]]:
        """Kinds of layer sets with several members, then each layer set; equal on all ranks."""
        every = sorted(
            {name for of_rank in self._scorer.groups.gather(sorted(self._sets.values())) for name in of_rank}
        )
        kinds: dict[str, set[str]] = {}
        for name in every:
            kinds.setdefault(re.sub(r"\blayers\.\d+\.", "layers.*.", name), set()).add(name)
        yield from ((kind, frozenset(members)) for kind, members in kinds.items() if len(members) > 1)
        yield from ((name, frozenset([name])) for name in every)

    def _of_routing(self, own: int) -> str:
        """The first layer whose router would choose other experts, in sequences that one version sampled alone."""
        plan = self._only(self._plan, self._is_alone)
        with self._scorer.store.walk() as walk:
            walk.load(own)
            sums = self._scorer.routing(self._batch, plan)
        differing = [layer for layer, (agreeing, replayed, *_) in sums.items() if agreeing < _AGREES * replayed]
        nothing = "no stored version fits its tokens, not even in a part"
        if not differing:
            return f"{nothing}; the engine chose the experts of {self._version(own)} in each layer" if sums else nothing
        return (
            f"{nothing}; the engine's experts differ from those of {self._version(own)} from layer {differing[0]} on, "
            f"so that a tensor in front of the router of model.layers.{differing[0]} differs"
        )

    def _is_alone(self, sequence: TrainingSequence) -> bool:
        """Whether the replica sampled the sequence, and gave its rows, with the version alone."""
        return {*map(served_by, sequence.runs)} == {self._served} and all(
            run.version == self._served.version for run in sequence.row_runs
        )

    def _only(self, plan: UpdatePlan, keep: Callable[[TrainingSequence], bool]) -> UpdatePlan:
        """The pass over some of the sequences of this rank."""
        micro_batches = [*plan.micro_batches]
        own = micro_batches[self._scorer.data_rank]
        micro_batches[self._scorer.data_rank] = [
            [n for n in numbers if keep(self._batch.sequence(n))] for numbers in own
        ]
        return replace(plan, micro_batches=micro_batches)

    def _version(self, update: int) -> str:
        versions = [version for version, of in self._batch.version_updates.items() if of == update]
        return f"version {max(versions)}" if versions else f"the weights after {update} updates"
