"""Micro-batches: their rows, forward pass and loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from megatron.core.utils import get_attr_wrapped_model
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from async_rl.trainer.batch.chains import chains_of
from async_rl.trainer.batch.forest import Forest, shared_prefixes
from async_rl.trainer.batch.micro_batch import Coordinates, PackedRows, pack_rows, take_rows
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.critic.value_head import ValueTerm
from async_rl.trainer.loss.distillation import DistillationConfig, TeacherTerm, teacher_columns, teacher_term
from async_rl.trainer.loss.logprobs import KeptTokens, OutputLayer, kept_logprobs_and_entropy, logprobs_and_entropy
from async_rl.trainer.loss.losses import LossConfig, Surrogate, kl_term, policy_loss
from async_rl.trainer.loss.ratios import FilterName, TokenLogprobs, Trajectories
from async_rl.trainer.loss.support_logprobs import support_logprobs
from async_rl.trainer.metrics import lag_buckets, old_columns, token_sums
from async_rl.trainer.model.attention import Rotary, RowContext
from async_rl.trainer.model.model import RouterReplayMode
from async_rl.trainer.planning import UpdatePlan
from async_rl.trainer.router_replay import MicroBatchRouting, replayed_tables
from message_queue.errors import ContractError
from message_queue.sampling_support import SamplingSupport
from message_queue.tokens import RoutingSpec
from message_queue.training_sequence import TrainingSequence

TOKEN_RESULTS = ("current", "filters", "gradient")
"""Results per token of the objective `policy`: logprobs under the current weights, the sum of 2^i over the filters
i of FILTERS that changed the weight, and the derivative of the loss by the logprob, once the backward pass has run."""
FILTERS: tuple[FilterName, ...] = get_args(FilterName)

ObjectiveKind = Literal["policy", "supervised", "logprobs", "values", "value_loss"]


@dataclass(slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Inputs of one forward pass on one rank, on its device: t rows with n tokens in the loss.

    Sequences of 5 and 4 tokens with positions (3, 4) and (3) in the loss, on one rank. These are the tokens 3, 4 and 8
    of the micro-batch. `loss_rows` is (2, 3, 7), because a row predicts the next token; if the sequences share their
    first 3 tokens, it is (2, 3, 2). With `first_loss_token` 0 and 2
    `numbers` is (0, 1, 2). If the sequences are the trajectories 6 and 9 of the batch, `trajectories` is (6, 9) and the
    column `trajectory` is (0, 0, 1).
    """

    token_ids: Tensor
    """int64 [1, t], 0 for padding."""
    loss_rows: Tensor
    """int64 [n], row that predicts each token in the loss; the last row of a shared prefix predicts several."""
    end_rows: Tensor
    """int64 [sequences], row of the last token of each sequence; -1 if it is on another context rank."""
    targets: Tensor
    """int64 [n], ids of the tokens in the loss."""
    numbers: Tensor
    """int64 [n], numbers of these tokens among the loss tokens of the update."""
    columns: dict[str, Tensor]
    """Inputs of the loss, [n] each: those of the batch, and what passes have added; see `MicroBatchResults`."""
    kept: KeptTokens | None
    """Tokens over which the distributions are normalised; None if all are over the whole vocabulary."""
    trajectories: Tensor
    """int64 [count], ascending, numbers in the batch of the trajectories in the micro-batch; equal on all ranks of a
    context-parallel group. The column `trajectory` has indices into it."""
    context: RowContext
    """Rows, rotary angles and routing."""
    temperature: float
    """Divisor of the logits, as of the batch."""
    has_padding: bool
    """Whether the rows of this rank include padding."""

    def forward(self, model: Any, *, at: Coordinates) -> Tensor:
        """Run the forward pass: hidden states [1, t, H]; on the last stage they are the input of the output layer."""
        return model(
            self.token_ids, None, None, packed_seq_params=self.context, padding_mask=self._padding_mask(model, at)
        )

    def _padding_mask(self, model: Any, at: Coordinates) -> Tensor | None:
        """Mask bool [1, rows], True for padding; the load-balance loss must not count it.

        With a mask, megatron weights that loss by the tokens of all tensor and context ranks; without a mask, by the
        tokens of this rank. Therefore the mask is None only for a single rank without padding. The first pipeline stage
        splits the mask for sequence parallelism; other stages expect a mask that is already split.
        """
        if not self.has_padding and at.tensor * at.context == 1:
            return None
        padding = self.context.rows.index < 0
        is_first = get_attr_wrapped_model(model, "pre_process")
        return (padding if is_first else padding.chunk(at.tensor)[at.tensor_rank]).unsqueeze(0)


@dataclass(slots=True, kw_only=True, eq=False)
class MicroBatchResults:
    """What passes have computed for a micro-batch. It is small, and stays when the micro-batch is gone."""

    numbers: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [n], as of the micro-batch."""
    trajectories: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [count], as of the micro-batch."""
    num_rows: tuple[int, int] = (0, 0)
    """Tokens on this rank with a shared token counted once, and for each of its sequences."""
    behaviour_logprobs: Tensor = field(default_factory=lambda: torch.empty(0))
    """float32 [n], the column of the micro-batch."""
    columns: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Columns [n] that later passes get in addition to, or in place of, those of the batch. If old logprobs were
    computed: `old_logprobs` float32, the behaviour logprobs of tokens whose version is not stored, and bool `old_known`
    and `old_fresh`."""
    tables: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """The routing that R2 has recorded; see `MicroBatchRouting`."""
    routing_sums: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """`MicroBatchRouting.sums` of the last pass."""
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Results of the objective, without those per token."""
    token_results: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Results of the objective `policy` [n]; see TOKEN_RESULTS."""


class OldLogprobs(NamedTuple):
    """Old logprobs of the N tokens in the loss of an update."""

    logprobs: Tensor
    """float32 [N], NaN for tokens whose version is not stored, fresh tokens, and those of other ranks."""
    is_fresh: Tensor
    """bool [N], fresh: the weights at the start of the update sampled the token, so that its logprob in the update is
    the old one."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchBuilder:
    """Builds the micro-batches of an update on one rank."""

    batch: TrainingBatch
    """With the content of the sequences of this rank."""
    update: UpdatePlan
    """Loss weights and token numbers."""
    _: KW_ONLY
    at: Coordinates
    """Coordinates of this rank."""
    device: torch.device
    """Device of this rank."""
    packing: bool
    """See `pack_rows`."""
    shares_prefixes: bool
    """Whether sequences of a micro-batch share the rows of common prefixes."""
    replay: RouterReplayMode
    """Kind of router replay."""
    routing: RoutingSpec | None
    """Layers and shape of the routing rows in the batch; None for a dense model."""
    teaches: DistillationConfig | None = None
    """The term of the teachers; None without any."""
    layers: Sequence[int]
    """Global numbers (from 0) of the MoE layers of this rank."""
    rotary: Rotary
    """Rotary angles of the model."""
    earlier: int | None = None
    """Rows before each that a convolution reads, in a model with recurrent layers; else None."""

    def build(self, numbers: Sequence[int]) -> MicroBatch:
        """Build the micro-batch of the sequences `numbers` of the batch; without sequences it has only padding.

        Raises:
            BatchError: routing rows cannot be replayed.
            ContractError: a token in the loss is not among the tokens that the sampler kept at its position.
        """
        sequences, to = [self.batch.sequence(number) for number in numbers], self.device
        rows = pack_rows(forest := self._forest(sequences), at=self.at, packing=self.packing)
        token_ids = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *(s.token_ids for s in sequences)])).long()
        loss = self._loss_columns(numbers)
        loss_rows = take_rows(rows.token_row, torch.where(loss["position"] > 0, loss["token"] - 1, -1), fill=-1)
        loss, loss_rows = loss[loss_rows >= 0], loss_rows[loss_rows >= 0]
        ends = torch.from_numpy(self.batch.lengths[np.array(numbers, np.int64)].cumsum()) - 1
        targets = token_ids[loss["token"]]
        kept = self._kept_tokens(sequences, loss["token"], targets)
        # Of all sequences, not only of the tokens on this rank, so that it is equal on all context ranks.
        trajectories = torch.from_numpy(self.batch.trajectory[list(numbers)]).unique(sorted=True)
        loss["trajectory"] = torch.searchsorted(trajectories, loss["trajectory"])
        cosine, signed_sine = self.rotary.at(rows.positions)
        chains = None
        if self.earlier is not None:
            chains = chains_of(forest, at=self.at, packing=self.packing, earlier=self.earlier).to(to)
        return MicroBatch(
            token_ids=take_rows(token_ids, rows.index, fill=0).unsqueeze(0).to(to),
            loss_rows=loss_rows.to(to),
            end_rows=take_rows(rows.token_row, ends, fill=-1).to(to),
            targets=targets.to(to),
            numbers=loss["number"],
            columns=cast(dict[str, Tensor], loss.exclude("token", "position", "number").to(to).to_dict()),
            kept=None if kept is None else kept.to(to),
            trajectories=trajectories,
            context=RowContext(
                rows=rows.to(to),
                rotary=(cosine.to(to), signed_sine.to(to)),
                routing=self._micro_batch_routing(dict(zip(numbers, sequences, strict=True)), rows, forest),
                chains=chains,
            ),
            temperature=self.batch.temperature,
            has_padding=bool((rows.index < 0).any()),
        )

    def _loss_columns(self, numbers: Sequence[int]) -> TensorDict:
        """Columns [n] of the tokens in the loss: the inputs of the loss, and `position`, `token` and `number`, their
        int64 positions, numbers among all tokens of the micro-batch and among the loss tokens of the update."""
        batch, update, own = self.batch, self.update, np.array(numbers, np.int64)
        found, counts = batch.loss_tokens_of(numbers)
        first = counts.cumsum() - counts
        start = batch.lengths[own].cumsum() - batch.lengths[own]

        def of_sequences(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values.repeat(counts))

        columns = {
            "behaviour_logprobs": torch.from_numpy(found.logprobs),
            "behaviour_rank": torch.from_numpy(ranks_within(found.logprobs, of=batch.trajectory[own].repeat(counts))),
            "lag_bucket": lag_buckets(torch.from_numpy(found.lag), torch.from_numpy(found.pure)),
            "exact": torch.from_numpy(found.exact),
            "advantages": of_sequences(batch.advantages[own]),
            "token_weights": of_sequences(update.token_weights[own]),
            "trajectory": of_sequences(batch.trajectory[own]),
            "token": torch.from_numpy(found.positions) + of_sequences(start),
            "position": torch.from_numpy(found.positions),
            "number": torch.arange(len(found.positions)) + of_sequences(update.first_loss_token[own] - first),
        }
        if self.teaches is not None:
            columns |= teacher_columns(found.teacher, tokens=len(found.positions), top_k=self.teaches.num_ids)
        return TensorDict(columns, batch_size=[len(found.positions)])

    def _kept_tokens(self, sequences: Sequence[TrainingSequence], tokens: Tensor, targets: Tensor) -> KeptTokens | None:
        """Kept tokens at the tokens in the loss, with numbers `tokens` int64 [n] in the micro-batch."""
        if all(sequence.support is None for sequence in sequences):
            return None
        support = SamplingSupport.join([s.support or SamplingSupport.whole(len(s)) for s in sequences])
        counts, token_ids = support.take(tokens.numpy()).unpack()
        kept = KeptTokens.of(torch.from_numpy(counts), torch.from_numpy(token_ids))
        if kept is not None and (absent := len(kept.cut) - kept.num_containing(targets)):
            raise ContractError(
                f"SamplingSupport of a micro-batch has {absent} of {len(kept.cut)} sets without the sampled token; "
                "each set must belong to the position of its token"
            )
        return kept

    def _forest(self, sequences: Sequence[TrainingSequence]) -> Forest:
        if self.shares_prefixes:
            return shared_prefixes(sequences, with_rows=self.replay == "R3")
        return Forest.separate([len(sequence) for sequence in sequences])

    def _micro_batch_routing(
        self, sequences: Mapping[int, TrainingSequence], rows: PackedRows, forest: Forest
    ) -> MicroBatchRouting | None:
        if self.replay == "none":
            return None
        nodes, positions, uses = (
            column.chunk(self.at.tensor)[self.at.tensor_rank] for column in (rows.nodes, rows.positions, rows.uses)
        )
        on_device = uses.to(self.device)
        if self.replay == "R2":
            return MicroBatchRouting(mode="record", tables={}, uses=on_device)
        assert self.routing is not None
        sequence = np.append(forest.sequence, len(sequences))[nodes.numpy()]
        tables = replayed_tables(
            sequences,
            np.where(uses.numpy() > 0, sequence, len(sequences)),
            positions.numpy(),
            routing=self.routing,
            layers=self.layers,
            to=self.device,
        )
        return MicroBatchRouting(mode="replay", tables=tables, uses=on_device)


class MicroBatches:
    """The micro-batches of an update on one rank. A micro-batch is built when a pass needs it, and not kept.

    Args:
        builder: the update's builder of micro-batches.
        sequences: numbers of the sequences of each micro-batch.

    Attributes:
        update: the update.
        sequences: as the argument.
        results: one object per micro-batch.
        old: of the tokens of the update on this rank; None if none were computed.
    """

    def __init__(self, builder: MicroBatchBuilder, sequences: Sequence[Sequence[int]]) -> None:
        self._builder = builder
        self.update = builder.update
        self.sequences = sequences
        self.old: OldLogprobs | None = None
        self.results = [MicroBatchResults() for _ in sequences]

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self._build, self.sequences, self.results)

    def add_column(self, name: str, values: NDArray[np.floating]) -> None:
        """Add a column to the results, after a pass, from values [N] of the tokens in the loss of the update."""
        for results in self.results:
            own = torch.from_numpy(values[results.numbers.numpy()])
            results.columns[name] = own.to(results.behaviour_logprobs.device, torch.float32)

    def _build(self, sequences: Sequence[int], results: MicroBatchResults) -> MicroBatch:
        micro_batch = self._builder.build(sequences)
        results.numbers, results.trajectories = micro_batch.numbers, micro_batch.trajectories
        results.behaviour_logprobs = micro_batch.columns["behaviour_logprobs"]
        uses = micro_batch.context.rows.uses
        results.num_rows = int(uses.count_nonzero()), int(uses.sum())
        if self.old is not None:
            old, fresh = (
                column[micro_batch.numbers].to(micro_batch.targets.device)
                for column in (self.old.logprobs, self.old.is_fresh)
            )
            results.columns |= {
                "old_logprobs": torch.where(old.isnan(), results.behaviour_logprobs, old),
                "old_known": fresh | ~old.isnan(),
                "old_fresh": fresh,
            }
        micro_batch.columns |= results.columns
        if (routing := micro_batch.context.routing) is not None:
            results.routing_sums = routing.sums
            if routing.mode == "record":
                routing.mode = "replay" if results.tables else "record"
                routing.tables = results.tables
        return micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Computes loss and sums from the hidden states of a micro-batch."""

    kind: ObjectiveKind
    """`policy`, `supervised` and `value_loss` are trained; `logprobs` and `values` return these without a loss."""
    loss: LossConfig
    """The policy loss."""
    layer: OutputLayer | None
    """The output layer; None before the last pipeline stage, the only one that computes the objective."""
    context_group: Any = None
    """Ranks with other tokens of the same trajectories; None for a single rank."""
    surrogate: Surrogate | None = None
    """The equation of `loss` in this update; None for `loss.equation()`."""
    value: ValueTerm | None = None
    """The value loss, alone or next to that of the policy; None without a critic in this model."""
    teaches: DistillationConfig | None = None
    """The term of the teachers; None without any."""

    def token_logprobs(self, hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Logprob of each token in the loss and entropy of its distribution, float32 [n] each.

        The distribution is the one that the engine sampled from: over the kept tokens, at its temperature.
        """
        rows, targets, kept = hidden[0, micro_batch.loss_rows], micro_batch.targets, micro_batch.kept
        settings: dict[str, Any] = {
            "layer": self.layer,
            "temperature": micro_batch.temperature,
            "with_entropy": self.kind == "policy",
        }
        if kept is None:
            return logprobs_and_entropy(rows, targets, **settings)
        cut = kept_logprobs_and_entropy(rows[kept.cut], targets[kept.cut], kept, **settings)
        if not len(kept.whole):
            return cut
        whole = logprobs_and_entropy(rows[kept.whole], targets[kept.whole], **settings)
        order = torch.cat((kept.cut, kept.whole)).argsort()
        return torch.cat((cut[0], whole[0]))[order], torch.cat((cut[1], whole[1]))[order]

    def __call__(self, hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss, a summand of the loss of the update, and float64 sums over the tokens (or the logprobs).

        Args:
            hidden: [1, t, H], the input of the output layer.
            micro_batch: with t rows.
        """
        if self.value is not None and self.kind == "values":
            return hidden.new_zeros(()), self.value.at_start(hidden, micro_batch)
        value_loss = None if self.value is None else self.value.loss(hidden, micro_batch)
        if value_loss is not None and self.kind == "value_loss":
            return value_loss, {"value_loss": value_loss.detach()}
        logprobs, entropy = self.token_logprobs(hidden, micro_batch)
        columns = micro_batch.columns
        match self.kind:
            case "logprobs":
                return logprobs.new_zeros(()), {"logprobs": logprobs.detach()}
            case "supervised":
                loss = -(columns["token_weights"] * logprobs).sum()
                return loss, {"loss": loss.detach(), "tokens": loss.new_tensor(float(len(logprobs)))}
            case _:
                taught = None if self.teaches is None else self._taught(logprobs, hidden, micro_batch, self.teaches)
                loss, results = self._policy(logprobs, entropy, micro_batch, taught)
                if value_loss is None:
                    return loss, results
                return loss + value_loss, {**results, "value_loss": value_loss.detach()}

    def _taught(
        self, current: Tensor, hidden: Tensor, micro_batch: MicroBatch, teaches: DistillationConfig
    ) -> TeacherTerm:
        assert self.layer is not None
        columns, student = micro_batch.columns, None
        if teaches.num_ids:
            rows = hidden[0, micro_batch.loss_rows]
            student = support_logprobs(rows, columns["teacher_ids"], layer=self.layer)
        return teacher_term(columns, current, student, teaches)

    def _policy(
        self, current: Tensor, entropy: Tensor, micro_batch: MicroBatch, taught: TeacherTerm | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        columns, index, count = micro_batch.columns, micro_batch.columns["trajectory"], len(micro_batch.trajectories)
        behaviour = columns["behaviour_logprobs"]
        advantages = columns["advantages"] if taught is None else taught.advantages
        logprobs = TokenLogprobs(
            current=current,
            behaviour=behaviour,
            behaviour_rank=columns["behaviour_rank"],
            old=torch.where(columns["old_fresh"], current.detach(), columns["old_logprobs"])
            if "old_logprobs" in columns
            else None,
            # Without a proximal pass the batch is one update, so the current policy is the proximal policy.
            proximal=columns.get("proximal_logprobs", current.detach()),
            reference=columns.get("reference_logprobs"),
        )
        token_loss, touched = policy_loss(
            logprobs,
            advantages=advantages,
            entropy=entropy,
            config=self.loss,
            trajectories=Trajectories(index=index, count=count, group=self.context_group),
            surrogate=self.surrogate,
        )
        if taught is not None and taught.loss is not None:
            token_loss = token_loss + taught.loss
        loss = (columns["token_weights"] * token_loss).sum()
        with torch.no_grad():
            both = {"current": current, "behaviour": behaviour}
            extra: dict[str, Tensor] = {name: touched[name] for name in self.loss.filters}
            if self.loss.kl_coefficient > 0 and logprobs.reference is not None:
                extra["kl"] = kl_term(logprobs, "k3", cap=self.loss.kl_weight_cap)
            if taught is not None:
                extra |= taught.sums
            if logprobs.old is not None:
                extra |= old_columns(logprobs.old, known=columns["old_known"], exact=columns["exact"], **both)
            sums = token_sums(
                **both,
                entropy=entropy,
                advantages=advantages,
                lag_bucket=columns["lag_bucket"],
                extra=extra,
            )
            drift = Trajectories(index=index, count=count).sums(current - behaviour)
            filters = torch.zeros_like(index, dtype=torch.uint8)
            for name, changed in touched.items():
                filters += changed.to(torch.uint8) << FILTERS.index(name)
        tokens = {"current": current.detach(), "filters": filters, "gradient": _gradient_of(current)}
        return loss, {**sums, "loss": loss.detach(), "trajectory": drift, **tokens}


def ranks_within(values: NDArray[np.float32], *, of: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of the values [n] with the same number in `of` int64 [n] that are lower; of equal ones the first is lower.

    Values (-1, -3, -2, -5) of (4, 4, 4, 7): (2/3, 0, 1/3, 0).
    """
    order = np.lexsort((values, of))
    _, first, counts = np.unique(of[order], return_index=True, return_counts=True)
    ranks = np.empty(len(values))
    ranks[order] = (np.arange(len(values)) - first.repeat(counts)) / counts.repeat(counts)
    return ranks


def _gradient_of(logprobs: Tensor) -> Tensor:
    """Tensor [n] that has the derivative of the loss by each logprob once the backward pass has run; zeros before."""
    gradient = torch.zeros_like(logprobs, requires_grad=False)

    def store(value: Tensor) -> None:
        gradient.copy_(value)

    if logprobs.requires_grad:
        logprobs.register_hook(store)
    return gradient


def scheduled_loss(
    hidden: Tensor, *, micro_batch: MicroBatch, objective: Objective
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Apply the objective in the form of megatron's schedules: (loss, token count, results).

    With a token count the schedules do not scale the loss; the value of the count is not used.
    """
    loss, results = objective(hidden, micro_batch)
    return loss, torch.zeros((), dtype=torch.int, device=hidden.device), results
