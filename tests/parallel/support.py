"""Batches, a transformers reference with forced routing, and trainer ranks for the tests of the trainer."""

import contextlib
import functools
import itertools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from tensordict import NonTensorData, NonTensorStack, TensorDict

from async_rl.trainer.batch.advantage import BatchRewards
from async_rl.trainer.batch.forest import prefixes_of
from async_rl.trainer.batch.training_batch import TrainingBatch, supervised_batch
from async_rl.trainer.critic.gae import GAE
from async_rl.trainer.loss.losses import DecoupledPPO, LossConfig, policy_loss, token_weights
from async_rl.trainer.loss.ratios import TokenLogprobs, Trajectories
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.state.optimizer import OptimizerConfig
from message_queue.sampling_support import SamplingSupport
from message_queue.training_sequence import RowRun, SampledRun, TeacherScores, TrainingSequence
from tests.conformance.reference import watched_routers
from tests.helpers import numerics, tiny_models
from tests.helpers.groups import sets_of
from tests.helpers.losses import ADVANTAGES
from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint

WARNINGS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # megatron's own float32 shares
)
MARKS = [pytest.mark.numerics, WARNINGS]
VOCAB, EXPERTS, TOP_K, LAYERS = 117, 8, 2, (1, 2, 3)
LENGTHS = (23, 9, 31, 14, 9, 17)
NO_UPDATE = OptimizerConfig(lr=1e-30, clip_grad=0.0)
TRAINER = TrainerConfig(micro_batch_tokens=64, timeout_s=60, threads=numerics.THREADS)


def save_tiny_moe(directory: Path) -> Path:
    """Qwen3-MoE: hidden 128, 4 layers (the first is dense), 8 experts top-2."""
    return save_checkpoint(qwen3_moe_config(rope_theta=1000.0), directory, seed=3)


def make_batch(lengths=LENGTHS, *, seed=0, routed=True, layers=3, support=False, top_k=None, vocab=VOCAB):
    """A padded RL batch of random tokens, rewards and routing; the first tokens of each sequence are a prompt.

    support: of most sampled tokens a random part of the vocabulary was kept. top_k: most likely tokens of a random
    teacher; the second sequence has none.
    """
    g = torch.Generator().manual_seed(seed)
    count, longest = len(lengths), max(lengths)
    size = torch.tensor(lengths)
    held = torch.arange(longest) < size.unsqueeze(1)
    mask = held & (torch.arange(longest) >= 4) & (torch.rand(count, longest, generator=g) > 0.2)
    batch = {
        "token_ids": torch.randint(0, vocab, (count, longest), generator=g) * held,
        "loss_mask": mask,
        "behaviour_logprobs": -torch.rand(count, longest, generator=g) * 4 - 1,
        "advantages": torch.randn(count, generator=g),
        "informative": torch.ones(count, dtype=torch.bool),
        "lag": torch.where(mask, 0, -1).to(torch.int32),
        "pure_lag0": mask.clone(),
        "lengths": size,
        "group": torch.arange(count) // 2,
        "rewards": torch.arange(count, dtype=torch.float64) % 3,
    }
    if routed:
        rows = torch.rand(count, longest, layers, EXPERTS, generator=g).topk(TOP_K).indices.to(torch.int16)
        rows[~held] = -1
        rows[torch.arange(count), size - 1] = -1  # the last token was never forwarded
        batch["routed_experts"] = rows
    if top_k is not None:
        add_teacher(batch, torch.randn(count, longest, vocab, generator=g).log_softmax(-1), top_k=top_k)
        batch["teacher_logprobs"][1] = torch.nan
    made = TensorDict(batch, batch_size=[count])
    return add_random_support(made, seed=seed) if support else made


def add_teacher(batch, logprobs, *, top_k):
    """Give the batch scores of a teacher with these logprobs [S, T, V]; row t is the distribution of token t."""
    top = logprobs.topk(top_k) if top_k else None
    batch["teacher_logprobs"] = logprobs.gather(-1, batch["token_ids"].unsqueeze(-1)).squeeze(-1).float()
    if top is not None:
        batch["teacher_ids"], batch["teacher_top"] = top.indices.int(), top.values.float()


def add_random_support(batch, *, vocab=VOCAB, seed=0):
    """Give the batch sets of 1 to `vocab` tokens that hold the sampled one, and none for one sampled token in five."""
    g = torch.Generator().manual_seed(seed)
    ids, mask = batch["token_ids"], batch["loss_mask"]
    share = torch.rand(*ids.shape, 1, generator=g) ** 2
    kept = torch.rand(*ids.shape, vocab, generator=g) < share
    kept.scatter_(-1, ids.unsqueeze(-1), True)
    kept &= (mask & (torch.rand(ids.shape, generator=g) > 0.2)).unsqueeze(-1)
    add_support(batch, [support_of(row[:n]) for row, n in zip(kept, batch["lengths"].tolist(), strict=True)])
    return batch


def add_support(batch, support):
    """Give a padded batch the tokens that the sampler kept, one SamplingSupport per sequence, of its length."""
    batch.set("support", NonTensorStack(*(NonTensorData(each) for each in support)))


TREES = {
    "group": [(0, 20)] * 8,
    "forks": [(0, 0), (0, 11), (1, 19), (0, 15), (3, 23), (1, 12)],
    "compaction": [(0, 0), (0, 6), (0, 6), (2, 14), (0, 0)],
    "mixed": [(0, 0), (0, 19), (0, 19), (0, 19), (1, 24), (0, 0), (5, 8), (6, 13), (0, 7), (0, 0)],
}
"""Shapes of batches: (an earlier sequence, tokens of the prefix shared with it) of each sequence."""
TREE_LENGTHS = (29, 26, 31, 24, 27, 22, 30, 25, 28, 23)


def make_tree_batch(shape, *, support=False, layers=3, other_rows=()):
    """A batch whose sequences share prefixes.

    shape: (an earlier sequence, tokens of the prefix shared with it) for each sequence.
    other_rows: (sequence, position) with another row than the sequences that share the tokens.
    """
    batch = make_batch(TREE_LENGTHS[: len(shape)], layers=layers)
    for number, (other, tokens) in enumerate(shape):
        for name in ("token_ids", "routed_experts") if tokens else ():
            batch[name][number, :tokens] = batch[name][other, :tokens]
    for number, position in other_rows:
        batch["routed_experts"][number, position] = (batch["routed_experts"][number, position] + 1) % EXPERTS
    return add_random_support(batch) if support else batch


UPDATE = 100  # of the weights at the start of a batch; version v holds v updates


def training_batch_of(padded, *, advantage="reinforce_plus_plus", truncated=()):
    """The ragged form of a padded batch: a sequence is a separate trajectory in the content of its group.

    advantage: how its rewards become advantages if the KL is in the reward; a name, or a GAE.
    truncated: numbers of the trajectories that a token limit cut.
    """
    columns = {name: padded[name] for name in padded.keys() if name != "support"}  # noqa: SIM118
    count = len(padded)
    mask = columns["loss_mask"]
    mini_batch = columns.get("mini_batch", torch.zeros(count, dtype=torch.int64)).numpy()
    group = columns.get("group", torch.arange(count)).unique(return_inverse=True)[1].numpy()
    contents = [[] for _ in range(group.max() + 1)]
    index = []
    for number, of in enumerate(group.tolist()):
        index.append((of, len(contents[of]), 0))
        contents[of].append((_sequence(padded, number, now=UPDATE + int(mini_batch[number])),))
    lag, pure = columns.get("lag"), columns.get("pure_lag0")
    impure = pure is not None and lag is not None and bool(((lag == 0) & mask).any()) and not bool(pure.any())
    return TrainingBatch(
        shared=prefixes_of([contents[of][at][0] for of, at, _ in index]),
        contents=[tuple(content) for content in contents],
        index=np.array(index),
        lengths=columns["lengths"].numpy(),
        num_loss_tokens=mask.sum(1).numpy(),
        trajectory=columns.get("trajectory", torch.arange(count)).numpy(),
        mini_batch=mini_batch,
        advantages=columns.get("advantages", torch.zeros(count)).numpy(),
        informative=columns.get("informative", torch.ones(count, dtype=torch.bool)).numpy(),
        current_update=UPDATE,
        version_updates={version: version for version in range(UPDATE - 10, UPDATE + 10)},
        retained_kv=impure,
        admitted_updates=[UPDATE - 1 if impure else UPDATE] * len(contents),
        truncated=truncated,
        rewards=BatchRewards(
            config=ADVANTAGES[advantage]() if isinstance(advantage, str) else advantage,
            values=columns["rewards"].numpy(),
            groups=group,
            agents=np.zeros(count, np.int64),
            sampled=mask.sum(1).numpy(),
        )
        if "rewards" in columns
        else None,
    )


def _sequence(padded, number, *, now):
    """A sequence of a padded batch; `now`: updates at its mini-batch."""
    length, keys = int(padded["lengths"][number]), set(padded.keys())
    mask = padded["loss_mask"][number, :length].numpy()
    positions, lag = np.flatnonzero(mask), np.zeros(length, np.int32)
    if "lag" in keys:
        lag = padded["lag"][number, :length].numpy()
    rows, row_runs, logprobs = None, (), np.zeros(len(positions), np.float32)
    if "routed_experts" in keys:
        experts = padded["routed_experts"][number, :length].numpy()
        given = (experts >= 0).all((1, 2))
        bounds = np.flatnonzero(np.diff(given, prepend=~given[:1], append=~given[-1:]))
        row_runs = tuple(
            RowRun(int(end - start), now if given[start] else -1) for start, end in itertools.pairwise(bounds)
        )
        rows = experts.clip(min=0).astype(np.uint8)
    if "behaviour_logprobs" in keys:
        logprobs = padded["behaviour_logprobs"][number, :length].numpy()[mask]
    teacher = None
    if "teacher_logprobs" in keys and not padded["teacher_logprobs"][number].isnan().all():
        names = [name for name in ("teacher_logprobs", "teacher_ids", "teacher_top") if name in keys]
        scores, *top = (padded[name][number, :length].numpy()[mask] for name in names)
        ids, top_logprobs = top or np.zeros((2, len(scores), 0))
        teacher = TeacherScores(logprobs=scores, ids=ids, top_logprobs=top_logprobs)
    return TrainingSequence(
        teacher=teacher,
        token_ids=padded["token_ids"][number, :length].numpy().astype(np.int32),
        runs=_sampled_runs(positions, (now - lag[mask]).astype(np.int32)),
        logprobs=logprobs,
        rows=rows,
        row_runs=row_runs,
        support=padded["support"][number] if "support" in keys else None,
    )


def support_of(kept):
    """The support of bool [n, V]: the kept tokens; a row without any is the whole vocabulary."""
    return SamplingSupport.pack(kept.sum(-1).numpy(), kept.nonzero()[:, 1].numpy())


def outside_support(batch, *, vocab=VOCAB):
    """bool [S, T, V]: tokens that the sampler left out."""
    outside = torch.zeros(*batch["token_ids"].shape, vocab, dtype=torch.bool)
    supports = batch["support"] if "support" in set(batch.keys()) else []
    for of_sequence, support in zip(outside, supports, strict=False):
        for row, ids in zip(of_sequence, sets_of(support), strict=False):
            row[:] = len(ids) > 0
            row[ids] = False
    return outside


def make_supervised_batch(seed=0):
    """The tokens and mask of `make_batch` as a supervised batch."""
    batch = make_batch(seed=seed)
    return supervised_batch(
        [
            (row[:n].numpy().astype("int32"), mask[:n].numpy())
            for row, mask, n in zip(batch["token_ids"], batch["loss_mask"], batch["lengths"].tolist(), strict=True)
        ]
    )


def start_trainer(
    checkpoint,
    *,
    optimizer=NO_UPDATE,
    loss=None,
    rank=0,
    rendezvous=None,
    recorder=None,
    delta=False,
    direct=None,
    fused=False,
    old_policy=None,
    critic=None,
    teaches=None,
    **changes,
):
    """A trainer rank with the settings of TRAINER but for `changes`; fused: of the layers in fused_layers.py."""
    from tests.parallel.fused_layers import fused_layers

    config = replace(TRAINER, **changes)
    with fused_layers() if fused else contextlib.nullcontext():
        return padded_rank()(
            config=config,
            optimizer=optimizer,
            loss=loss or DecoupledPPO(),
            checkpoint=checkpoint,
            rank=rank,
            world_size=config.ranks,
            rendezvous=rendezvous,
            delta=delta,
            host=None if direct is None else "127.0.0.1",
            direct=direct,
            recorder=recorder,
            old_policy=old_policy,
            critic=critic,
            teaches=teaches,
        )


@contextlib.contextmanager
def given_reference(passes, batch):
    """Take the logprobs of the reference out of a batch that has them and is one update of all its sequences."""
    if "reference_logprobs" not in set(batch.keys()):
        yield
        return
    given = batch["reference_logprobs"][batch["loss_mask"]]

    def reference(micro_batches, _weights):
        for micro_batch, results in zip(micro_batches, micro_batches.results, strict=True):
            results.columns["reference_logprobs"] = given[micro_batch.numbers].to(micro_batch.targets.device)

    with mock.patch.object(passes, "reference", reference):
        yield


@functools.cache
def padded_rank():
    """A TrainerRank that takes padded batches too, and answers them with padded logprobs.

    With a critic, the advantages are those of GAE.
    """
    from async_rl.trainer.rank import TrainerRank

    class PaddedRank(TrainerRank):
        def train(self, batch, **advantage):
            if not isinstance(batch, TensorDict):
                return super().train(batch)
            if self._critic is not None:
                advantage = {"advantage": GAE(gamma=0.95, lam=0.9, whiten=False), **advantage}
            with given_reference(self._forward_backward, batch):
                return super().train(training_batch_of(batch, **advantage))

        def logprobs(self, batch):
            if not isinstance(batch, TensorDict):
                return super().logprobs(batch)
            found = super().logprobs(training_batch_of(batch))
            mask = batch["loss_mask"]
            return torch.zeros(mask.shape).masked_scatter_(mask, torch.cat(found))

    return PaddedRank


def gradients(trainer, *, adapters=False):
    """Name as in `exported` -> gradient of the last update, on the CPU; collective."""
    for chunk in trainer.model.wrapped:
        gather_gradients(chunk)
    with mock.patch("async_rl.trainer.model.source.exported_value", _gradient):
        return exported(trainer, adapters=adapters)


def _gradient(weight):
    """Gradient of a parameter or of one of its experts; None of a buffer, then left out."""
    whole = getattr(weight, "whole", weight)
    if not hasattr(whole, "main_grad"):
        return None
    return whole.main_grad.detach() if whole is weight else whole.main_grad.detach()[weight.expert]


def exported(trainer, *, adapters=False):
    """Hugging Face name -> complete weight, or matrix of an adapter: copies on the CPU of every rank; collective."""
    from async_rl.trainer.model.source import WeightSource

    source = WeightSource(trainer.model.chunks, shape=trainer.model.shape, adapters=adapters)
    mine = {name: tensor.to("cpu", copy=True).contiguous() for _, sent in source.buckets() for name, tensor in sent}
    ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, mine)
    return {name: tensor for held in ranks for name, tensor in held.items()}


def gather_gradients(wrapped):
    """Make `main_grad` whole if the distributed optimizer has left each rank its share; collective."""
    if not wrapped.ddp_config.use_distributed_optimizer:
        return
    for bucket_group in wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups:
        group = bucket_group.intra_distributed_optimizer_instance_group
        for bucket in bucket_group.buckets:
            shares = list(bucket.grad_data.chunk(group.size()))
            torch.distributed.all_gather(shares, shares[group.rank()].clone(), group=group)


def load_reference(checkpoint):
    """The same weights in transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


def live_routing(model, token_ids):
    """int64 [T, L, K]: the experts that a transformers model chooses for tokens int64 [T], ascending."""
    with torch.no_grad(), watched_routers(model, None) as seen:
        model(token_ids[None])
    return torch.stack([torch.from_numpy(layer.experts) for layer in seen], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One update of a batch by transformers in float64, and the error of float32."""

    logprobs: torch.Tensor
    """float64 [S, T]: logprob of each token given those before it; 0 for the first and for padding."""
    loss: float
    gradients: dict[str, torch.Tensor]
    """float64, by Hugging Face name, one tensor per expert."""
    logprob_bound: float
    """How far a float32 implementation may be from `logprobs`; so are the other bounds."""
    loss_bound: float
    gradient_bound: float
    """Of `largest_difference`."""
    distance_bound: float
    """Of `distance`."""


def supervised_terms(batch, current, _entropy):
    """The terms of the supervised loss of `batch`."""
    mask = batch["loss_mask"]
    return -current[mask] / mask.sum()


def policy_terms(config: LossConfig, *, reference=None, advantage="reinforce_plus_plus"):
    """Function of the terms of a policy loss of a batch, all tokens at once.

    reference: dtype -> logprobs [S, T] of the reference, for a KL in the reward. advantage: name of the advantage then.
    """

    def terms(batch, logprobs, entropy):
        mask = batch["loss_mask"]
        current, behaviour, of = logprobs[mask], batch["behaviour_logprobs"][mask], mask.nonzero()[:, 0]
        advantages = batch["advantages"][of]
        if config.penalises_rewards:
            kl = [(p - r)[own] for p, r, own in zip(logprobs.detach(), reference(logprobs.dtype), mask, strict=True)]
            advantages = torch.cat(penalised_advantages(batch, kl, name=advantage, coefficient=config.kl_coefficient))
        token_loss, _ = policy_loss(
            TokenLogprobs(
                current=current,
                behaviour=behaviour,
                proximal=current.detach(),
                behaviour_rank=torch.cat([_ranks(batch["behaviour_logprobs"][i][own]) for i, own in enumerate(mask)]),
            ),
            advantages=advantages,
            entropy=entropy[mask],
            config=config,
            trajectories=Trajectories(index=of, count=len(batch)),
            surrogate=config.equation(current.detach() - behaviour),
        )
        weights = token_weights(
            mask.sum(1), aggregation=config.aggregation, group=batch["group"], fixed_length=config.fixed_length
        )
        return weights[of] * token_loss

    return terms


def _ranks(values):
    """Share of the values [n] that are lower, of equal ones those before."""
    return values.argsort(stable=True).argsort() / torch.tensor(max(1, len(values)), dtype=torch.float64)


def penalised_advantages(batch, kl, *, name, coefficient):
    """Advantages of the tokens of each trajectory from the rewards minus coefficient * KL, written out.

    kl: [n] of each trajectory.
    """
    rewards, groups = batch["rewards"].to(kl[0].dtype), batch["group"]
    penalised = rewards - coefficient * torch.stack([of.sum() for of in kl])
    if name == "reinforce_plus_plus":
        values = [reward - coefficient * of.flip(0).cumsum(0).flip(0) for reward, of in zip(rewards, kl, strict=True)]
    elif name == "batch_mean":
        values = [(value - penalised.mean()).expand(len(of)) for value, of in zip(penalised, kl, strict=True)]
    elif name == "contrastive":
        won = penalised > 0.5
        share = torch.where(won, won.double().mean(), -(~won).double().mean())
        values = [
            (0.5 / value if 0 < won.sum() < len(won) else value.sign()).expand(len(of))
            for value, of in zip(share, kl, strict=True)
        ]
    else:
        values = []
        for number, of in enumerate(kl):
            own = penalised[groups == groups[number]]
            value = penalised[number] - own.mean()
            if name == "grpo":
                value = value / (own.std() + 1e-6)
            if name == "rloo":
                value = value * len(own) / (len(own) - 1)
            values.append(value.expand(len(of)))
    if not name.startswith("reinforce"):
        return values
    tokens = torch.cat(values)
    return [(of - tokens.mean()) / (tokens.var() + 1e-8).sqrt() for of in values]


def reference_step(model, batch, terms, *, routed=True) -> Expected:
    """One update of a batch: in float64 for the result, and in float32 for the error of float32.

    model: of transformers, in float32. terms: (batch, logprobs [S, T], entropy [S, T]) -> tensor whose sum is the loss.
    routed: over the rows of the batch; free rows, and all rows otherwise, are of the live routers in float64.
    """
    rows = batch["routed_experts"] if routed else None
    exact_model = numerics.float64_model(model)
    with numerics.float64_forward():
        logprobs, loss_terms, grads, used = _step(exact_model, batch, terms, rows)
    logprobs_32, loss_terms_32, grads_32, _ = _step(model, batch, terms, used)
    # The error of a sum, not of this sum: errors of its terms may cancel by chance.
    sum_error = (loss_terms - loss_terms_32).abs().sum().item() + numerics.EPSILON * loss_terms.abs().sum().item()
    return Expected(
        logprobs=logprobs,
        loss=loss_terms.sum().item(),
        gradients=grads,
        logprob_bound=numerics.FACTOR * numerics.error(logprobs_32, logprobs),
        loss_bound=numerics.FACTOR * sum_error,
        gradient_bound=numerics.FACTOR * largest_difference(grads_32, grads),
        distance_bound=numerics.FACTOR * distance(grads_32, grads),
    )


def expected_step(checkpoint, batch, loss=None, *, routed=True, **terms):
    """`reference_step` with a policy loss and the weights of a checkpoint."""
    return reference_step(
        load_reference(checkpoint), batch, policy_terms(loss or DecoupledPPO(), **terms), routed=routed
    )


def _step(model, batch, terms, rows):
    """Logprobs, terms of the loss, gradients, and the experts that were used, [S, T, L, K] or None."""
    model.zero_grad()
    logprobs, entropies, used = [], [], []
    longest = batch["token_ids"].shape[1]
    outside = outside_support(batch)
    for i, length in enumerate(batch["lengths"].tolist()):
        ids = batch["token_ids"][i, :length]
        with watched_routers(model, None if rows is None else rows[i, :length]) as found:
            logits = model(ids[None]).logits[0, :-1]
        cut = outside[i, 1:length]
        scores = logits.masked_fill(cut, -torch.inf).log_softmax(-1)
        pad = (1, longest - length)
        logprobs.append(torch.nn.functional.pad(scores.gather(1, ids[1:, None])[:, 0], pad))
        entropies.append(torch.nn.functional.pad(-(scores.exp() * scores.masked_fill(cut, 0.0)).sum(-1), pad))
        experts = [torch.from_numpy(layer.experts) for layer in found]
        chosen = torch.stack(experts, 1) if experts else torch.zeros(length, 0, TOP_K, dtype=torch.int64)
        used.append(torch.nn.functional.pad(chosen, (0, 0, 0, 0, 0, longest - length)))
    current = torch.stack(logprobs)
    loss_terms = terms(batch, current, torch.stack(entropies))
    loss_terms.sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    grads = checkpoint_names(model, grads)
    return current.detach(), loss_terms.detach(), grads, torch.stack(used)


def checkpoint_names(model, tensors):
    """Tensors of a transformers model by the names in its checkpoints, one for each expert."""
    family = model.config.model_type
    if family == "gpt_oss":
        return tensors
    tensors = per_expert(tensors)
    if model.name_or_path and tiny_models.has_vision(transformers.AutoConfig.from_pretrained(model.name_or_path)):
        tensors = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in tensors.items()}
    if family != "mixtral":
        return tensors
    old = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return {functools.reduce(lambda n, pair: n.replace(*pair), old.items(), name): t for name, t in tensors.items()}


def per_expert(tensors):
    """Fused expert tensors of transformers cut into one per expert."""
    out = {}
    for name, tensor in tensors.items():
        prefix, fused, kind = name.partition(".mlp.experts.")
        if not fused or kind not in ("gate_up_proj", "down_proj"):
            out[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)
            for projection, part in parts if kind == "gate_up_proj" else [(kind, weight)]:
                out[f"{prefix}.mlp.experts.{expert}.{projection}.weight"] = part
    return out


def largest_difference(ours, theirs):
    """Largest difference of any tensor, relative to the largest entry of that tensor in `theirs`."""
    assert ours.keys() == theirs.keys()
    least = torch.finfo(torch.float32).tiny
    return max(((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=least)).item() for n in theirs)


def distance(ours, theirs):
    """|ours - theirs| / |theirs|, all tensors taken as one vector."""
    assert ours.keys() == theirs.keys()
    squares = torch.tensor([[((ours[n] - t).double() ** 2).sum(), (t.double() ** 2).sum()] for n, t in theirs.items()])
    difference, norm = squares.sum(0).sqrt().tolist()
    return difference / norm


def assert_near(ours, theirs, *, bound):
    """Every value of `ours` is within `bound` of `theirs`."""
    numerics.assert_within((ours.double() - theirs.double()).abs().max().item(), bound)


def assert_equal_gradients(ours, expected, theirs=None):
    """`ours` are the gradients of `expected`, or those of `theirs`, another float32 implementation."""
    parts, theirs = (1, expected.gradients) if theirs is None else (2, theirs)
    numerics.assert_within(distance(ours, theirs), parts * expected.distance_bound, "distance")
    numerics.assert_within(largest_difference(ours, theirs), parts * expected.gradient_bound, "largest difference")


def assert_equal_steps(loss, grads, expected):
    """Loss and gradients of an update are those of `expected`."""
    numerics.assert_within(abs(loss - expected.loss), expected.loss_bound, "loss")
    assert_equal_gradients(grads, expected)


def assert_trains_as(trainer, batch, expected, **options):
    """Train a batch: loss and gradients are those of `expected`; returns the metrics."""
    metrics = trainer.train(batch, **options)
    assert_equal_steps(metrics["loss"], gradients(trainer), expected)
    return metrics


def assert_same(ours, theirs):
    """Two sets of named tensors are equal bit for bit."""
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def assert_equal_metrics(ours, theirs, expected):
    """Metrics of an update by two float32 trainers; `expected` is the reference.

    All but loss and gradient norm are means over tokens of some f(d), d = current - behaviour logprob, or shares of
    tokens, which do not change. Of every f here |f'| <= 2 (|f| + |d| + 1): d, exp(d) - 1 - d, (exp(d) - 1)^2, weights.
    Of the histogram of |d| the bins do not depend on rounding either, unless |d| lies at the edge of one.
    """
    assert ours.keys() == theirs.keys()
    drift, mean = 2 * expected.logprob_bound, theirs["mismatch/abs_mean"]
    for key, value in theirs.items():
        bound = 2 * drift * (abs(value) + mean + 1)
        if key == "loss":
            bound = 2 * expected.loss_bound
        elif key == "grad_norm":
            bound = 2 * expected.distance_bound * value
        elif key == "kl/penalty":
            bound *= theirs["tokens"]  # of a trajectory at most
        if not math.isnan(value):
            numerics.assert_within(abs(ours[key] - value), bound, key)


def assert_equal_weights(ours, theirs, expected, *, optimizer, updates):
    """Weights of two float32 trainers after some updates by AdamW that are like that of `expected`.

    An update is lr * m / (sqrt(v) + eps), in the gradient at most as steep as lr / eps: eps must not be small. A weight
    is rounded once in each update. A defect of one update moves weights by about lr.
    """
    assert ours.keys() == theirs.keys()
    norm = math.sqrt(sum((t.double() ** 2).sum().item() for t in expected.gradients.values()))
    steepness = optimizer.lr / optimizer.eps * (min(1.0, optimizer.clip_grad / norm) if optimizer.clip_grad else 1.0)
    for name, weight in theirs.items():
        gradient = expected.gradients[name].abs().max().item() if name in expected.gradients else 0.0
        moved = 2 * expected.gradient_bound * gradient * steepness
        bound = updates * (moved + numerics.FACTOR * numerics.EPSILON * weight.abs().max().item())
        numerics.assert_within((ours[name] - weight).abs().max().item(), bound, name)


def _sampled_runs(positions, versions):
    """Positions 3, 4, 6 of versions 4, 4, 5 are the runs (3, 2, 4) and (6, 1, 5)."""
    if not len(positions):
        return ()
    starts = np.flatnonzero((np.diff(positions, prepend=-2) != 1) | (np.diff(versions, prepend=-2) != 0))
    counts = np.diff(starts, append=len(positions))
    found = zip(positions[starts].tolist(), counts.tolist(), versions[starts].tolist(), strict=True)
    return tuple(SampledRun(*run) for run in found)
