"""The work of one micro-batch: its rows, its forward pass and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from async_rl.batch.micro_batch import Coordinates, PackedRows, pack_rows, take_rows
from async_rl.batch.routed_experts import local_tables
from async_rl.train.attention import Rotary, RowContext
from async_rl.train.logprobs import logprobs_and_entropy
from async_rl.train.losses import LossConfig, TokenLogprobs, policy_loss
from async_rl.train.metrics import token_sums
from async_rl.train.model import RouterReplayMode
from async_rl.train.router_replay import MicroBatchRouting
from message_queue.tokens import RoutingSpec


@dataclass(slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Inputs of one forward pass on one rank, on its device.

    token_ids: int64 [1, t]. loss_rows: int64 [n], the rows that predict a token that enters the loss.
    targets: int64 [n], those tokens. columns: what the loss needs per token, [n] each.
    flat: int64 [n], where the tokens lie in the flattened [S * T] batch.
    """

    token_ids: Tensor
    loss_rows: Tensor
    targets: Tensor
    flat: Tensor
    columns: dict[str, Tensor]
    context: RowContext
    has_padding: bool
    sums: dict[str, float] = field(default_factory=dict[str, float])

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
        routing: RoutingSpec | None,
        layers: Sequence[int],
        rotary: Rotary,
    ) -> None:
        self._batch = batch
        self._at = at
        self._device = device
        self._packing = packing
        self._token_weights = token_weights
        self._replay: RouterReplayMode = replay if routing is not None else "none"
        self._routing = routing
        self._layers = layers
        self._rotary = rotary
        self._lengths: list[int] = batch["lengths"].tolist()
        self._row_length: int = batch["token_ids"].shape[1]

    def build(self, indices: Sequence[int]) -> MicroBatch:
        """The micro-batch of sequences `indices`; padding only if there are none."""
        rows = pack_rows(self._lengths, indices, row_length=self._row_length, at=self._at, packing=self._packing)
        batch, keys = self._batch, set(self._batch.keys())
        mask = take_rows(batch["loss_mask"], rows.next_index, fill=False)
        loss_rows = mask.nonzero().squeeze(-1)
        flat = rows.next_index[loss_rows]
        columns = {
            name: batch[name].flatten()[flat]
            for name in ("behaviour_logprobs", "reference_logprobs", "pure_lag0")
            if name in keys
        }
        sequence = torch.div(flat, self._row_length, rounding_mode="floor")
        if "advantages" in keys:
            columns["advantages"] = batch["advantages"][sequence]
        if self._token_weights is not None:
            columns["token_weights"] = self._token_weights[sequence]
        to = self._device
        return MicroBatch(
            token_ids=take_rows(batch["token_ids"], rows.index, fill=0).unsqueeze(0).to(to),
            loss_rows=loss_rows.to(to),
            targets=batch["token_ids"].flatten()[flat].to(to),
            flat=flat,
            columns={name: column.to(to) for name, column in columns.items()},
            context=RowContext(
                rows=rows.to(to),
                rotary=self._rotary_at(rows.positions),
                routing=self._micro_batch_routing(rows),
            ),
            has_padding=bool((rows.index < 0).any()),
        )

    def _rotary_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, signed_sine = self._rotary.at(positions)
        return cosine.to(self._device), signed_sine.to(self._device)

    def _micro_batch_routing(self, rows: PackedRows) -> MicroBatchRouting | None:
        real = (rows.router_index >= 0).to(self._device)
        match self._replay:
            case "none":
                return None
            case "R2":
                return MicroBatchRouting(mode="record", tables={}, real=real)
            case "R3":
                assert self._routing is not None
                tables = local_tables(
                    self._batch["routed_experts"], rows.router_index, routing=self._routing, layers=self._layers
                )
                tables = {layer: table.to(self._device) for layer, table in tables.items()}
                return MicroBatchRouting(mode="replay", tables=tables, real=real)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is done with the logits of a micro-batch.

    vocab_columns: columns of this rank's logits without vocabulary padding.
    """

    kind: Literal["policy", "supervised", "logprobs"]
    loss: LossConfig
    tensor_group: Any
    vocab_columns: int

    def token_logprobs(self, logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """float32 [n] logprob of each token that enters the loss, and the entropy of its distribution."""
        return logprobs_and_entropy(
            logits[0, :, : self.vocab_columns].index_select(0, micro_batch.loss_rows),
            micro_batch.targets,
            group=self.tensor_group,
            full_columns=logits.shape[-1],
            temperature=1.0 if self.kind == "supervised" else self.loss.temperature,
            with_entropy=self.kind == "policy",
        )

    def __call__(self, logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss, already weighted for the whole batch, and float64 sums over the tokens."""
        logprobs, entropy = self.token_logprobs(logits, micro_batch)
        columns = micro_batch.columns
        match self.kind:
            case "logprobs":
                return logprobs.new_zeros(()), {"logprobs": logprobs.detach()}
            case "supervised":
                loss = -(columns["token_weights"] * logprobs).sum()
                return loss, {"loss": loss.detach(), "tokens": torch.tensor(float(len(logprobs)))}
            case "policy":
                return self._policy(logprobs, entropy, columns)

    def _policy(self, current: Tensor, entropy: Tensor, columns: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        behaviour = columns["behaviour_logprobs"]
        logprobs = TokenLogprobs(
            current=current,
            behaviour=behaviour,
            # One update per batch: the weights are still those of the batch's start.
            proximal=columns.get("proximal_logprobs", current.detach()),
            reference=columns.get("reference_logprobs"),
        )
        token_loss, clipped = policy_loss(logprobs, advantages=columns["advantages"], entropy=entropy, config=self.loss)
        loss = (columns["token_weights"] * token_loss).sum()
        return loss, token_sums(loss, current, behaviour, entropy, clipped, columns["pure_lag0"])
