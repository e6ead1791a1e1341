"""The work of one micro-batch: its rows, its forward pass and its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from async_rl.batch.micro_batch import Coordinates, PackedRows, pack_rows, take_rows
from async_rl.batch.routed_experts import replayed_rows
from async_rl.batch.training_batch import TrainingBatch
from async_rl.train.attention import Rotary, RowContext
from async_rl.train.logprobs import KeptTokens, kept_logprobs_and_entropy, logprobs_and_entropy
from async_rl.train.losses import LossConfig, TokenLogprobs, Trajectories, kl_term, policy_loss
from async_rl.train.mismatch import lag_buckets, token_sums
from async_rl.train.model import RouterReplayMode
from async_rl.train.planning import UpdatePlan
from async_rl.train.router_replay import MicroBatchRouting, layer_tables
from message_queue.sequence import TrainingSequence
from message_queue.support import SamplingSupport
from message_queue.tokens import ContractError, RoutingSpec

_LOSS_COLUMNS = {
    "behaviour_logprobs": torch.float32,
    "lag_bucket": torch.int64,
    "advantages": torch.float32,
    "token_weights": torch.float32,
    "trajectory": torch.int64,
}
"""What the loss needs of each token, and its type."""
_PLACES = {"token": torch.int64, "number": torch.int64}

ObjectiveKind = Literal["policy", "supervised", "logprobs"]


@dataclass(slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Inputs of one forward pass on one rank, on its device.

    token_ids: int64 [1, t]. loss_rows: int64 [n], the rows that predict a token that enters the loss.
    targets: int64 [n], those tokens. columns: what the loss needs per token, [n] each.
    kept: over which tokens their distributions are normalised; None if all are over the whole vocabulary.
    numbers: int64 [n], numbers of these tokens among those in the loss of the update.
    trajectories: int64 [count], numbers of the trajectories that the micro-batch holds, the same on all ranks that
        share it; the column `trajectory` says by their place here which one a token is of. sums: what the objective
        returned.
    """

    token_ids: Tensor
    loss_rows: Tensor
    targets: Tensor
    numbers: Tensor
    columns: dict[str, Tensor]
    kept: KeptTokens | None
    trajectories: Tensor
    context: RowContext
    has_padding: bool
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def forward(self, model: Any, *, at: Coordinates) -> Tensor:
        """Logits [1, t, V / tensor] on the last pipeline stage, hidden states before it."""
        return model(
            self.token_ids, None, None, packed_seq_params=self.context, padding_mask=self._padding_mask(model, at)
        )

    def _padding_mask(self, model: Any, at: Coordinates) -> Tensor | None:
        """True for padding, which the load-balance loss must not count; None on one rank without padding.

        With a mask megatron weighs that loss by the tokens of all tensor and context ranks, without one by those of
        this rank; so several ranks always give one. Its first stage cuts the mask for sequence parallelism itself, the
        others expect it cut.
        """
        if not self.has_padding and at.tensor * at.context == 1:
            return None
        padding = self.context.rows.index < 0
        first = unwrap(model).pre_process
        return (padding if first else padding.chunk(at.tensor)[at.tensor_rank]).unsqueeze(0)


def unwrap(model: Any) -> Any:
    """The GPTModel inside what schedules call."""
    while hasattr(model, "module"):
        model = model.module
    return model


class MicroBatchBuilder:
    """Builds the micro-batches of an update on one rank.

    Args:
        replay: which routing the micro-batch carries.
        routing: what the rows of the batch mean; None for a dense model. layers: MoE layers of this rank (global, from
            0).
    """

    def __init__(
        self,
        batch: TrainingBatch,
        update: UpdatePlan,
        *,
        at: Coordinates,
        device: torch.device,
        packing: bool,
        replay: RouterReplayMode,
        routing: RoutingSpec | None,
        layers: Sequence[int],
        rotary: Rotary,
    ) -> None:
        self._batch = batch
        self._update = update
        self._at = at
        self._device = device
        self._packing = packing
        self._replay: RouterReplayMode = replay
        self._routing = routing
        self._layers = layers
        self._rotary = rotary

    def build(self, numbers: Sequence[int]) -> MicroBatch:
        """The micro-batch of sequences `numbers` of the batch; padding only if there are none.

        Raises:
            RoutingError: rows that cannot be replayed.
            ContractError: a token in the loss is not among those that the sampler kept at its position.
        """
        sequences, to = [self._batch.sequence(number) for number in numbers], self._device
        rows = pack_rows([len(sequence) for sequence in sequences], at=self._at, packing=self._packing)
        token_ids = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *(s.token_ids for s in sequences)])).long()
        loss = self._loss_columns(numbers)
        place = torch.full((len(token_ids),), -1).index_copy(0, loss["token"], torch.arange(len(loss)))
        place = take_rows(place, rows.next_index, fill=-1)
        loss_rows = (place >= 0).nonzero().squeeze(-1)
        loss = loss[place[loss_rows]]
        targets = token_ids[loss["token"]]
        kept = self._kept_tokens(sequences, loss["token"], targets)
        # Of all sequences, not of the tokens here: with context parallelism other ranks hold others.
        trajectories = torch.from_numpy(self._batch.trajectory[list(numbers)]).unique(sorted=True)
        loss["trajectory"] = torch.searchsorted(trajectories, loss["trajectory"])
        return MicroBatch(
            token_ids=take_rows(token_ids, rows.index, fill=0).unsqueeze(0).to(to),
            loss_rows=loss_rows.to(to),
            targets=targets.to(to),
            numbers=loss["number"],
            columns={name: loss[name].to(to) for name in _LOSS_COLUMNS},
            kept=None if kept is None else kept.to(to),
            trajectories=trajectories,
            context=RowContext(
                rows=rows.to(to),
                rotary=self._rotary_at(rows.positions),
                routing=self._micro_batch_routing(dict(zip(numbers, sequences, strict=True)), rows),
            ),
            has_padding=bool((rows.index < 0).any()),
        )

    def _loss_columns(self, numbers: Sequence[int]) -> TensorDict:
        """Columns of the n tokens in the loss of sequences, end to end.

        token: int64 [n], place among the tokens of the micro-batch. number: int64 [n], among those of the update.
        """
        batch, update, start = self._batch, self._update, 0
        found = {name: [torch.empty(0, dtype=kind)] for name, kind in (_LOSS_COLUMNS | _PLACES).items()}
        for number in numbers:
            positions, logprobs, lag, pure = batch.loss_tokens(number)
            count = len(positions)
            columns = {
                "behaviour_logprobs": torch.from_numpy(logprobs),
                "lag_bucket": lag_buckets(torch.from_numpy(lag), torch.from_numpy(pure)),
                "advantages": torch.full((count,), float(batch.advantages[number])),
                "token_weights": torch.full((count,), float(update.token_weights[number])),
                "trajectory": torch.full((count,), int(batch.trajectory[number])),
                "token": start + torch.from_numpy(positions),
                "number": int(update.first_loss_token[number]) + torch.arange(count),
            }
            for name, column in columns.items():
                found[name].append(column)
            start += int(batch.lengths[number])
        joined = {name: torch.cat(columns) for name, columns in found.items()}
        return TensorDict(joined, batch_size=[len(joined["token"])])

    def _kept_tokens(self, sequences: Sequence[TrainingSequence], tokens: Tensor, targets: Tensor) -> KeptTokens | None:
        """What the sampler kept at the places `tokens` [n] of the micro-batch, where `targets` [n] are."""
        if all(sequence.support is None for sequence in sequences):
            return None
        support = SamplingSupport.join([s.support or SamplingSupport.whole(len(s)) for s in sequences])
        counts, token_ids = support.take(tokens.numpy()).unpack()
        kept = KeptTokens.of(torch.from_numpy(counts), torch.from_numpy(token_ids))
        if kept is not None and (absent := len(kept.cut) - kept.num_containing(targets)):
            raise ContractError(
                f"SamplingSupport of a micro-batch has {absent} of {len(kept.cut)} sets without the sampled token; "
                "the sets must be those of the sampled positions"
            )
        return kept

    def _rotary_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, signed_sine = self._rotary.at(positions)
        return cosine.to(self._device), signed_sine.to(self._device)

    def _micro_batch_routing(
        self, sequences: Mapping[int, TrainingSequence], rows: PackedRows
    ) -> MicroBatchRouting | None:
        if self._replay == "none":
            return None
        index, segments, positions = (
            column.chunk(self._at.tensor)[self._at.tensor_rank]
            for column in (rows.index, rows.segments, rows.positions)
        )
        real = (index >= 0).to(self._device)
        if self._replay == "R2":
            return MicroBatchRouting(mode="record", tables={}, real=real)
        assert self._routing is not None
        experts, live = replayed_rows(
            sequences, segments.numpy(), positions.numpy(), routing=self._routing, layers=self._layers
        )
        tables = layer_tables(torch.from_numpy(experts), torch.from_numpy(live), layers=self._layers, to=self._device)
        return MicroBatchRouting(mode="replay", tables=tables, real=real)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is done with the logits of a micro-batch.

    vocab_columns: columns of this rank's logits without vocabulary padding.
    context_group: ranks that hold other tokens of the same trajectories; None for none.
    log_ratio_bound: of the update; see `losses.surrogate`.
    """

    kind: ObjectiveKind
    loss: LossConfig
    tensor_group: Any
    vocab_columns: int
    context_group: Any = None
    log_ratio_bound: float = math.inf

    def token_logprobs(self, logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """float32 [n] logprob of each token that enters the loss, and the entropy of its distribution.

        The distribution is the sampler's: over the tokens that it kept, at its temperature.
        """
        rows, targets, kept = micro_batch.loss_rows, micro_batch.targets, micro_batch.kept
        settings: dict[str, Any] = {
            "group": self.tensor_group,
            "temperature": 1.0 if self.kind == "supervised" else self.loss.temperature,
            "with_entropy": self.kind == "policy",
        }

        def over_all(rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            vocabulary = logits[0, :, : self.vocab_columns]
            return logprobs_and_entropy(vocabulary, rows, targets, full_columns=logits.shape[-1], **settings)

        if kept is None:
            return over_all(rows, targets)
        cut = kept_logprobs_and_entropy(
            logits[0], rows[kept.cut], targets[kept.cut], kept, columns=self.vocab_columns, **settings
        )
        if not len(kept.whole):
            return cut
        whole = over_all(rows[kept.whole], targets[kept.whole])
        order = torch.cat((kept.cut, kept.whole)).argsort()
        return torch.cat((cut[0], whole[0]))[order], torch.cat((cut[1], whole[1]))[order]

    def __call__(self, logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss, already weighted for the whole batch, and float64 sums over the tokens."""
        logprobs, entropy = self.token_logprobs(logits, micro_batch)
        columns = micro_batch.columns
        match self.kind:
            case "logprobs":
                return logprobs.new_zeros(()), {"logprobs": logprobs.detach()}
            case "supervised":
                loss = -(columns["token_weights"] * logprobs).sum()
                return loss, {"loss": loss.detach(), "tokens": loss.new_tensor(float(len(logprobs)))}
            case "policy":
                return self._policy(logprobs, entropy, micro_batch)

    def _policy(self, current: Tensor, entropy: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        columns, index, count = micro_batch.columns, micro_batch.columns["trajectory"], len(micro_batch.trajectories)
        behaviour, advantages, reference = (
            columns["behaviour_logprobs"],
            columns["advantages"],
            columns.get("reference_logprobs"),
        )
        logprobs = TokenLogprobs(
            current=current,
            behaviour=behaviour,
            # Without a proximal pass the batch is one update: its weights are those of the batch's start.
            proximal=columns.get("proximal_logprobs", current.detach()),
            reference=reference,
        )
        token_loss, touched = policy_loss(
            logprobs,
            advantages=advantages,
            entropy=entropy,
            config=self.loss,
            trajectories=Trajectories(index=index, count=count, group=self.context_group),
            log_ratio_bound=self.log_ratio_bound,
        )
        loss = (columns["token_weights"] * token_loss).sum()
        with torch.no_grad():
            extra: dict[str, Tensor] = {name: touched[name] for name in self.loss.filters}
            if self.loss.kl_coefficient > 0 and reference is not None:
                extra["kl"] = kl_term(logprobs, "k3", cap=self.loss.behaviour_weight_cap)
            sums = token_sums(
                current=current,
                behaviour=behaviour,
                entropy=entropy,
                advantages=advantages,
                lag_bucket=columns["lag_bucket"],
                extra=extra,
            )
            drift = Trajectories(index=index, count=count).sums(current - behaviour)
        return loss, {**sums, "loss": loss.detach(), "trajectory": drift}


def scheduled_loss(
    logits: Tensor, *, micro_batch: MicroBatch, objective: Objective
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The objective in the form megatron's schedules take: (loss, token count, results).

    With a token count the schedules leave the loss as it is; the count itself is not used.
    """
    loss, results = objective(logits, micro_batch)
    return loss, torch.zeros((), dtype=torch.int, device=logits.device), results
