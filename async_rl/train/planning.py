"""A batch cut into what each trainer rank is sent: its sequences in micro-batches, and the routing rows it replays.

What a rank must know of all sequences (weights of the loss, counts of tokens, how many micro-batches) is settled here,
from the whole batch, so that ranks agree on it without seeing each other's tokens. Imports nothing of megatron: the
driver cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from async_rl.batch.collate import add_support
from async_rl.batch.micro_batch import Coordinates, HeldTokens, held_tokens, padded_lengths, router_index
from async_rl.batch.packing import Plan, plan_micro_batches
from async_rl.batch.routed_experts import RoutingError, check_routed_experts, rows_at
from async_rl.train.losses import LossConfig, token_weights
from async_rl.train.model import TrainerConfig
from message_queue.support import SamplingSupport
from message_queue.tokens import RoutingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a trainer rank stands.

    data_rank: which sequences it trains. at: which of their tokens.
    layers: global numbers of the layers whose routing rows it replays out of a batch; none but with R3.
    """

    data_rank: int = 0
    at: Coordinates = field(default_factory=Coordinates)
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateShare:
    """What one rank trains of an optimizer update.

    per_sequence: what the sequences of its micro-batches have one of, one sequence after the other; keys as in
        `async_rl.batch.collate`, lengths those of the whole sequences. micro_batches: each a list of indices into them.
    per_token: what they have of each token, without routed_experts; the tokens that the rank holds
        (`async_rl.batch.micro_batch.HeldTokens`) end to end. num_held: int64 [H], how many of each sequence.
    support: of the same tokens, those that the sampler kept; None if it cut no distribution.
    rows: of each micro-batch int16 [r, layers, K], the rows its routers replay, in their order; None to replay none.
    token_weights: float32 [H], what each token of a sequence weighs in the loss.
    places: int64 [H], numbers of the sequences in the update, which has `shape` (S, T) over all ranks.
    num_tokens, num_loss_tokens: of the update over all ranks.
    """

    per_sequence: TensorDict
    micro_batches: Sequence[Sequence[int]]
    per_token: TensorDict
    num_held: Tensor
    support: SamplingSupport | None
    rows: Sequence[Tensor] | None
    token_weights: Tensor
    places: Tensor
    shape: tuple[int, int]
    num_tokens: int
    num_loss_tokens: int

    @property
    def width(self) -> int:
        """Most tokens that the rank holds of a sequence."""
        return max([1, *self.num_held.tolist()])

    def sequences(self) -> TensorDict:
        """All columns, those of tokens [H, width] padded with 0 on the right; `support` for the held tokens alone."""
        held = torch.arange(self.width) < self.num_held.unsqueeze(1)
        columns = {
            name: column.new_zeros(held.shape).masked_scatter_(held, column)
            for name, column in _columns(self.per_token)
        }
        batch = TensorDict({**columns, **dict(_columns(self.per_sequence))}, batch_size=[len(held)])
        if self.support is not None and len(batch):
            ends = zip(self.num_held.tolist(), self.num_held.cumsum(0).tolist(), strict=True)
            add_support(batch, [self.support.part(end - count, end) for count, end in ends])
        return batch

    def in_update(self, flat: Tensor, positions: Tensor) -> Tensor:
        """int64 [n]: where tokens lie in the flattened [S * T] update.

        Args:
            flat: int64 [n], where they lie in the flattened `sequences`. positions: int64 [n], in their sequences.
        """
        return self.places[torch.div(flat, self.width, rounding_mode="floor")] * self.shape[1] + positions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchShare:
    """What one rank trains of a batch. trajectories: of the whole batch, as their numbers count them.

    updates: one of each mini-batch, in the order of the optimizer steps; None if it has nothing to train.
    """

    updates: Sequence[UpdateShare | None]
    trajectories: int


class Planner:
    """Cuts batches for the ranks at `places`. Every method gives a share for each of these; equal places share one.

    Args:
        routing: what routing rows mean; None for a dense model.
    """

    def __init__(
        self, *, config: TrainerConfig, loss: LossConfig, routing: RoutingSpec | None, places: Sequence[RankPlace]
    ) -> None:
        self._config = config
        self._loss = loss
        self._routing = routing
        # Ranks that replay no rows are sent the same, whichever part of their rows the routers see.
        self._places = [place if place.layers else replace(place, at=_without_tensor(place.at)) for place in places]

    def policy(self, batch: TensorDict) -> list[BatchShare]:
        """An RL batch, in trainer.updates_per_batch updates: its mini-batches, by the key `mini_batch`.

        Trajectories of groups without spread are not sent, unless a KL or entropy term trains them too. With
        loss.count=all they count in the weights of the others all the same.

        Raises:
            RoutingError: R3, and the routing rows do not fit the model or the batch.
            ValueError: the mini-batches of the batch are not those of trainer.updates_per_batch.
        """
        self._check_routing(batch)
        if "trajectory" not in set(batch.keys()):
            batch = batch.copy().set("trajectory", torch.arange(len(batch)))
        cut = [self._mini_batch(batch, part) for part in self._split(batch)]
        trajectories = int(batch["trajectory"].max()) + 1
        shares = {
            place: BatchShare(
                updates=[None if update is None else update[place] for update in cut], trajectories=trajectories
            )
            for place in set(self._places)
        }
        return [shares[place] for place in self._places]

    def whole(self, batch: TensorDict) -> list[UpdateShare]:
        """All sequences of an RL batch together; raises as `policy` does."""
        self._check_routing(batch)
        cut = self._policy_update(batch, torch.arange(len(batch)))
        return [cut[place] for place in self._places]

    def supervised(self, batch: TensorDict) -> list[UpdateShare]:
        """A supervised batch, which is one update."""
        weights = token_weights(batch["loss_mask"].sum(1), aggregation="token_mean")
        numbers = torch.arange(len(batch))
        cut = self._cut(batch, numbers, [[i] for i in range(len(batch))], weights, replayed=False)
        return [cut[place] for place in self._places]

    def _split(self, batch: TensorDict) -> list[Tensor]:
        """The sequences of each mini-batch of a batch."""
        count = self._config.updates_per_batch
        if "mini_batch" not in set(batch.keys()):
            if count == 1:
                return [torch.arange(len(batch))]
            raise ValueError(f"trainer.updates_per_batch is {count}, but the batch has no key `mini_batch`; add it")
        of = batch["mini_batch"]
        if not 0 <= int(of.min()) <= int(of.max()) < count:
            raise ValueError(
                f"the batch has mini-batches {int(of.min())} to {int(of.max())} with "
                f"trainer.updates_per_batch={count}; number them 0 to {count - 1}, or change trainer.updates_per_batch"
            )
        return [(of == number).nonzero().squeeze(1) for number in range(count)]

    def _mini_batch(self, batch: TensorDict, numbers: Tensor) -> dict[RankPlace, UpdateShare] | None:
        """One optimizer step on the sequences `numbers` of the batch; None if there is nothing to train."""
        informative = batch["informative"][numbers]
        kept = torch.ones_like(informative) if self._loss.needs_every_token else informative
        counted = torch.ones_like(informative) if self._loss.count == "all" else informative
        if not bool(kept.any()):
            return None
        return self._policy_update(batch, numbers[counted], kept=kept[counted])

    def _policy_update(
        self, batch: TensorDict, numbers: Tensor, *, kept: Tensor | None = None
    ) -> dict[RankPlace, UpdateShare]:
        """One update over the sequences `numbers` of the batch.

        kept: bool [numbers], those that are forwarded; None for all. The others count in the weights only.

        Where the loss weighs whole trajectories, all sequences of one are in one micro-batch, which may then hold more
        than trainer.micro_batch_tokens where a trajectory does (resume_routing=split).
        """
        of_sequence = batch.select("trajectory", "group", strict=False)[numbers]
        trajectory = of_sequence.get("trajectory", None)
        weights = token_weights(
            batch["loss_mask"].sum(1)[numbers],
            aggregation=self._loss.aggregation,
            trajectory=trajectory,
            group=of_sequence.get("group", None),
            fixed_length=self._loss.fixed_length,
        )
        if kept is not None:
            numbers, weights = numbers[kept], weights[kept]
            trajectory = None if trajectory is None else trajectory[kept]
        units = [[i] for i in range(len(numbers))]
        if self._loss.needs_whole_trajectories and trajectory is not None:
            units = _trajectories(trajectory)
        return self._cut(batch, numbers, units, weights, replayed=True)

    def _cut(
        self, batch: TensorDict, numbers: Tensor, units: list[list[int]], weights: Tensor, *, replayed: bool
    ) -> dict[RankPlace, UpdateShare]:
        """Shares of micro-batches of whole units, each a list of indices into `numbers`."""
        lengths: list[int] = batch["lengths"][numbers].tolist()
        plan = self._plan([sum(lengths[i] for i in unit) for unit in units])
        counts = (sum(lengths), int(batch["loss_mask"][numbers].sum()))
        shares: dict[RankPlace, UpdateShare] = {}
        for place in set(self._places):
            micro_batches = [[i for unit in chosen for i in units[unit]] for chosen in plan[place.data_rank]]
            held = torch.tensor([i for indices in micro_batches for i in indices], dtype=torch.int64)
            in_batch = [numbers[indices].tolist() for indices in micro_batches]
            counts_held, per_token, support = self._held(batch, in_batch, place.at)
            shares[place] = UpdateShare(
                per_sequence=TensorDict(
                    {name: column[numbers[held]] for name, column in _columns(batch) if column.dim() == 1},
                    batch_size=[len(held)],
                ),
                per_token=per_token,
                num_held=counts_held,
                support=support,
                micro_batches=_consecutive(micro_batches),
                rows=[self._rows(batch, indices, place) for indices in in_batch] if replayed and place.layers else None,
                token_weights=weights[held],
                places=held,
                shape=(len(numbers), batch["token_ids"].shape[1]),
                num_tokens=counts[0],
                num_loss_tokens=counts[1],
            )
        return shares

    def _plan(self, lengths: Sequence[int]) -> Plan:
        config = self._config
        return plan_micro_batches(
            lengths,
            max_tokens=config.micro_batch_tokens * config.parallel.context,
            num_ranks=config.data_parallel,
            padded=not config.packing,
            # Megatron's interleaved schedule takes micro-batches in groups of as many as there are stages.
            multiple=config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1,
        )

    def _held(
        self, batch: TensorDict, micro_batches: Sequence[Sequence[int]], at: Coordinates
    ) -> tuple[Tensor, TensorDict, SamplingSupport | None]:
        """Tokens of all micro-batches that the context rank at `at` holds.

        How many of each sequence, their columns, and the tokens that the sampler kept at their positions.
        """
        numbers = torch.tensor([i for indices in micro_batches for i in indices], dtype=torch.int64)
        lengths: list[int] = batch["lengths"].tolist()
        padded = [padded_lengths(lengths, indices, at=at, packing=self._config.packing) for indices in micro_batches]
        held = held_tokens(batch["lengths"][numbers], torch.cat([*padded, numbers[:0]]), at=at)
        positions = held.positions(width=max([1, *held.counts.tolist()]))
        sequence, position = numbers.repeat_interleave(held.counts), positions[positions >= 0]
        columns = {name: column[sequence, position] for name, column in _columns(batch) if column.dim() == 2}
        return held.counts, TensorDict(columns, batch_size=[len(position)]), _held_support(batch, numbers, held)

    def _rows(self, batch: TensorDict, indices: Sequence[int], place: RankPlace) -> Tensor:
        assert self._routing is not None
        return replayed_rows(
            batch, indices, at=place.at, packing=self._config.packing, routing=self._routing, layers=place.layers
        )

    def _check_routing(self, batch: TensorDict) -> None:
        if self._config.router_replay != "R3" or self._routing is None:
            return
        if "routed_experts" not in set(batch.keys()):
            raise RoutingError(
                "trainer.router_replay is R3, but the batch has no routed_experts; "
                "let the engine capture routing, or use trainer.router_replay=R2 or none"
            )
        check_routed_experts(batch["routed_experts"], batch["lengths"], routing=self._routing)


def replayed_rows(
    batch: TensorDict,
    indices: Sequence[int],
    *,
    at: Coordinates,
    packing: bool,
    routing: RoutingSpec,
    layers: Sequence[int],
) -> Tensor:
    """int16 [r, layers, K]: rows that the routers at `at` replay in the micro-batch of sequences `indices`."""
    lengths: list[int] = batch["lengths"].tolist()
    index = router_index(lengths, indices, row_length=batch["token_ids"].shape[1], at=at, packing=packing)
    return rows_at(batch["routed_experts"], index, given=routing.layers, layers=layers)


def _columns(batch: TensorDict) -> list[tuple[str, Tensor]]:
    """What every rank has a part of; routing rows and kept tokens are cut apart."""
    apart = ("routed_experts", "support")
    return [(name, cast(Tensor, column)) for name, column in batch.items() if name not in apart]


def _held_support(batch: TensorDict, numbers: Tensor, held: HeldTokens) -> SamplingSupport | None:
    """Kept tokens at the positions of the sequences `numbers` that a context rank holds, end to end."""
    if "support" not in set(batch.keys()):
        return None
    of_sequences: Sequence[SamplingSupport] = batch["support"]
    ranges = zip(numbers.tolist(), held.begins.tolist(), held.ends.tolist(), strict=True)
    return SamplingSupport.join(
        [
            of_sequences[number].part(begin, end)
            for number, begins, ends in ranges
            for begin, end in zip(begins, ends, strict=True)
            if begin < end
        ]
    )


def _without_tensor(at: Coordinates) -> Coordinates:
    return replace(at, tensor=1, tensor_rank=0)


def _consecutive(micro_batches: Sequence[Sequence[int]]) -> list[list[int]]:
    """As many indices in each, counted through from 0."""
    ends = torch.tensor([len(indices) for indices in micro_batches]).cumsum(0).tolist()
    return [list(range(end - len(indices), end)) for end, indices in zip(ends, micro_batches, strict=True)]


def _trajectories(trajectory: Tensor) -> list[list[int]]:
    """The sequences of each trajectory."""
    of: list[int] = trajectory.unique(return_inverse=True)[1].tolist()
    units: list[list[int]] = [[] for _ in range(max(of, default=-1) + 1)]
    for sequence, number in enumerate(of):
        units[number].append(sequence)
    return units
