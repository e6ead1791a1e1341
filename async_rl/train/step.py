"""The work of one micro-batch: its rows, its forward pass and its loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from async_rl.batch.micro_batch import Coordinates, PackedRows, pack_rows, take_rows
from async_rl.train.attention import Rotary, RowContext
from async_rl.train.logprobs import KeptTokens, kept_logprobs_and_entropy, logprobs_and_entropy
from async_rl.train.losses import LossConfig, TokenLogprobs, Trajectories, kl_term, policy_loss
from async_rl.train.mismatch import lag_buckets, token_sums
from async_rl.train.model import RouterReplayMode
from async_rl.train.router_replay import MicroBatchRouting, layer_tables
from message_queue.support import SamplingSupport
from message_queue.tokens import ContractError

ObjectiveKind = Literal["policy", "supervised", "logprobs"]


@dataclass(slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Inputs of one forward pass on one rank, on its device.

    token_ids: int64 [1, t]. loss_rows: int64 [n], the rows that predict a token that enters the loss.
    targets: int64 [n], those tokens. columns: what the loss needs per token, [n] each.
    kept: over which tokens their distributions are normalised; None if all are over the whole vocabulary.
    flat: int64 [n], where the tokens lie in the flattened [S * T] batch. positions: int64 [n], in their sequences.
    trajectories: int64 [count], numbers of the trajectories that the micro-batch holds, the same on all ranks that
        share it; the column `trajectory` says by their place here which one a token is of. sums: what the objective
        returned.
    """

    token_ids: Tensor
    loss_rows: Tensor
    targets: Tensor
    flat: Tensor
    positions: Tensor
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
    """Cuts micro-batches out of one batch for one rank.

    Args:
        batch: keys as in `async_rl.batch.collate`; a context rank has the tokens that it holds (UpdateShare.sequences).
        token_weights: float32 [S], weight of each token of a sequence in the loss; None for no loss.
        replay: which routing the micro-batch carries. layers: MoE layers of this rank (global, from 0).
    """

    def __init__(
        self,
        batch: TensorDict,
        *,
        at: Coordinates,
        device: torch.device,
        packing: bool,
        token_weights: Tensor | None,
        replay: RouterReplayMode,
        layers: Sequence[int],
        rotary: Rotary,
    ) -> None:
        self._batch = batch
        self._at = at
        self._device = device
        self._packing = packing
        self._token_weights = token_weights
        self._replay: RouterReplayMode = replay
        self._layers = layers
        self._rotary = rotary
        self._support: Sequence[SamplingSupport] = batch["support"] if "support" in set(batch.keys()) else ()
        self._lengths: list[int] = batch["lengths"].tolist()
        self._row_length: int = batch["token_ids"].shape[1]

    def build(self, indices: Sequence[int], routed: Tensor | None = None) -> MicroBatch:
        """The micro-batch of sequences `indices`; padding only if there are none.

        Args:
            routed: for R3, integer [rows, layers, K], see `async_rl.batch.routed_experts.rows_at`; None for no layers.

        Raises:
            ContractError: a token in the loss is not among those that the sampler kept at its position.
        """
        rows = pack_rows(self._lengths, indices, row_length=self._row_length, at=self._at, packing=self._packing)
        batch, keys = self._batch, set(self._batch.keys())
        mask = take_rows(batch["loss_mask"], rows.next_index, fill=False)
        loss_rows = mask.nonzero().squeeze(-1)
        flat = rows.next_index[loss_rows]
        columns = {
            name: batch[name].flatten()[flat] for name in ("behaviour_logprobs", "reference_logprobs") if name in keys
        }
        if "pure_lag0" in keys:
            lag = batch["lag"] if "lag" in keys else torch.zeros_like(batch["token_ids"])
            columns["lag_bucket"] = lag_buckets(lag.flatten()[flat], batch["pure_lag0"].flatten()[flat])
        sequence = torch.div(flat, self._row_length, rounding_mode="floor")
        of_sequence = batch["trajectory"] if "trajectory" in keys else torch.arange(len(batch))
        # Of all sequences, not of the tokens here: with context parallelism other ranks hold others.
        trajectories = of_sequence[torch.tensor(indices, dtype=torch.int64)].unique(sorted=True)
        columns["trajectory"] = torch.searchsorted(trajectories, of_sequence[sequence])
        if "advantages" in keys:
            columns["advantages"] = batch["advantages"][sequence]
        if self._token_weights is not None:
            columns["token_weights"] = self._token_weights[sequence]
        targets, to = batch["token_ids"].flatten()[flat], self._device
        kept = self._kept_tokens(indices, flat, targets)
        return MicroBatch(
            token_ids=take_rows(batch["token_ids"], rows.index, fill=0).unsqueeze(0).to(to),
            loss_rows=loss_rows.to(to),
            targets=targets.to(to),
            flat=flat,
            positions=rows.positions[loss_rows] + 1,
            columns={name: column.to(to) for name, column in columns.items()},
            kept=None if kept is None else kept.to(to),
            trajectories=trajectories,
            context=RowContext(
                rows=rows.to(to),
                rotary=self._rotary_at(rows.positions),
                routing=self._micro_batch_routing(rows, routed),
            ),
            has_padding=bool((rows.index < 0).any()),
        )

    def _kept_tokens(self, indices: Sequence[int], flat: Tensor, targets: Tensor) -> KeptTokens | None:
        """What the sampler kept at the positions of `targets` [n], which lie at `flat` in the batch."""
        if not self._support or not indices:
            return None
        of_sequences = [self._support[i] for i in indices]
        first = torch.zeros(len(self._support), dtype=torch.int64)
        first[list(indices)] = torch.tensor([0, *(len(each) for each in of_sequences[:-1])]).cumsum(0)
        position = first[torch.div(flat, self._row_length, rounding_mode="floor")] + flat % self._row_length
        counts, token_ids = SamplingSupport.join(of_sequences).take(position.numpy()).unpack()
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

    def _micro_batch_routing(self, rows: PackedRows, routed: Tensor | None) -> MicroBatchRouting | None:
        if self._replay == "none":
            return None
        real = (rows.router_index >= 0).to(self._device)
        if self._replay == "R2":
            return MicroBatchRouting(mode="record", tables={}, real=real)
        tables = {} if routed is None else layer_tables(routed.to(self._device), layers=self._layers)
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
            return logprobs_and_entropy(
                vocabulary.index_select(0, rows), targets, full_columns=logits.shape[-1], **settings
            )

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
