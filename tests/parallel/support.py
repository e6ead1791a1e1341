"""Batches, a transformers reference with forced routing, and trainer ranks for the tests of the trainer."""

import contextlib
import functools
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from tensordict import TensorDict

from async_rl.batch.collate import collate_supervised
from async_rl.train.losses import LossConfig, TokenLogprobs, policy_loss, token_weights
from async_rl.train.model import TrainerConfig
from async_rl.train.optimizer import OptimizerConfig
from tests.tiny_models import qwen3_moe_config, save_checkpoint

VOCAB, EXPERTS, TOP_K, LAYERS = 117, 8, 2, (1, 2, 3)
LENGTHS = (23, 9, 31, 14, 9, 17)
NO_UPDATE = OptimizerConfig(lr=1e-30, clip_grad=0.0)
TRAINER = TrainerConfig(micro_batch_tokens=64, timeout_s=60)


def save_tiny_moe(directory: Path) -> Path:
    """Qwen3-MoE: hidden 128, 4 layers of which the first is dense, 8 experts top-2."""
    return save_checkpoint(qwen3_moe_config(rope_theta=1000.0), directory, seed=3)


def make_batch(lengths=LENGTHS, *, seed=0, routed=True, behaviour=None, layers=3):
    """An RL batch of random tokens, rewards and routing; the first tokens of each sequence are a prompt."""
    g = torch.Generator().manual_seed(seed)
    count, longest = len(lengths), max(lengths)
    size = torch.tensor(lengths)
    held = torch.arange(longest) < size.unsqueeze(1)
    mask = held & (torch.arange(longest) >= 4) & (torch.rand(count, longest, generator=g) > 0.2)
    batch = {
        "token_ids": torch.randint(0, VOCAB, (count, longest), generator=g) * held,
        "loss_mask": mask,
        "behaviour_logprobs": -torch.rand(count, longest, generator=g) * 4 - 1,
        "advantages": torch.randn(count, generator=g),
        "informative": torch.ones(count, dtype=torch.bool),
        "lag": torch.where(mask, 0, -1).to(torch.int32),
        "pure_lag0": mask.clone(),
        "lengths": size,
        "group": torch.arange(count) // 2,
    }
    if behaviour is not None:
        batch["behaviour_logprobs"] = behaviour
    if routed:
        rows = torch.rand(count, longest, layers, EXPERTS, generator=g).topk(TOP_K).indices.to(torch.int16)
        rows[~held] = -1
        rows[torch.arange(count), size - 1] = -1  # the last token was never forwarded
        batch["routed_experts"] = rows
    return TensorDict(batch, batch_size=[count])


def make_supervised_batch(seed=0):
    """The tokens and mask of `make_batch` as a supervised batch."""
    batch = make_batch(seed=seed)
    return collate_supervised(
        [
            (row[:n].numpy().astype("int32"), mask[:n].numpy())
            for row, mask, n in zip(batch["token_ids"], batch["loss_mask"], batch["lengths"].tolist(), strict=True)
        ]
    )


def start_trainer(checkpoint, *, optimizer=NO_UPDATE, loss=None, rank=0, rendezvous=None, fused=False, **changes):
    """A trainer rank with the settings of TRAINER but for `changes`; fused: of the layers in fused_layers.py."""
    from async_rl.train.worker import TrainerRank
    from tests.parallel.fused_layers import fused_layers

    config = replace(TRAINER, **changes)
    with fused_layers() if fused else contextlib.nullcontext():
        return TrainerRank(
            config=config,
            optimizer=optimizer,
            loss=loss or LossConfig(),
            checkpoint=checkpoint,
            rank=rank,
            world_size=config.ranks,
            rendezvous=rendezvous,
        )


def gradients(trainer):
    """Hugging Face name -> gradient of the last update."""
    from async_rl.train.convert import export_weights

    model = trainer.model
    for chunk in model.wrapped:
        gather_gradients(chunk)
    return dict(export_weights(model.chunks, shape=model.shape, read=lambda p: p.main_grad.detach()))


def gather_gradients(wrapped):
    """Make `main_grad` whole where the distributed optimizer has left each rank its share; collective."""
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


def routers_of(model):
    """The routers of a transformers model, layer after layer."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


@contextlib.contextmanager
def forced_routing(model, rows):
    """Make every router of a transformers model choose `rows` [T, L, K]; rows of -1 are left to it."""

    def forcing(given):
        def force(router, _inputs, output):
            logits, _, live = output
            chosen = torch.where(given < 0, live, given)
            return logits, gate_weights(router, logits, chosen), chosen

        return force

    hooks = [r.register_forward_hook(forcing(rows[:, i].long())) for i, r in enumerate(routers_of(model))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gate_weights(router, logits, experts):
    """[T, K] weights of given experts, by the equations of the papers."""
    # DeepSeek-V3 and GLM-4.5: sigmoid scores; their bias steers the choice alone.
    sigmoid = hasattr(router, "e_score_correction_bias")
    weights = (logits.sigmoid() if sigmoid else logits.softmax(-1)).gather(1, experts)
    if getattr(router, "norm_topk_prob", True):  # Mixtral always norms
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0)


def live_routing(model, token_ids):
    """int64 [T, L, K]: the experts that a transformers model chooses for tokens int64 [T], ascending."""
    seen = []
    hooks = [r.register_forward_hook(lambda _r, _i, output: seen.append(output[2])) for r in routers_of(model)]
    with torch.no_grad():
        model(token_ids[None])
    for hook in hooks:
        hook.remove()
    return torch.stack([experts.sort(-1).values for experts in seen], dim=1)


def reference_logprobs(model, batch, *, routed=True):
    """float32 [S, T] logprob of each token given those before it (0 for the first and for padding), and entropy."""
    logprobs, entropies = [], []
    longest = batch["token_ids"].shape[1]
    for i, length in enumerate(batch["lengths"].tolist()):
        ids = batch["token_ids"][i, :length]
        context = forced_routing(model, batch["routed_experts"][i, :length]) if routed else contextlib.nullcontext()
        with context:
            scores = model(ids[None]).logits[0, :-1].log_softmax(-1)
        pad = (1, longest - length)
        logprobs.append(torch.nn.functional.pad(scores.gather(1, ids[1:, None])[:, 0], pad))
        entropies.append(torch.nn.functional.pad(-(scores.exp() * scores).sum(-1), pad))
    return torch.stack(logprobs), torch.stack(entropies)


def reference_step(model, batch, loss: LossConfig, *, routed=True):
    """Loss and gradients (Hugging Face names, one tensor per expert) of one policy update."""
    model.zero_grad()
    current, entropy = reference_logprobs(model, batch, routed=routed)
    mask = batch["loss_mask"]
    weights = token_weights(mask.sum(1), aggregation=loss.aggregation)
    rows = mask.nonzero()[:, 0]
    token_loss, _ = policy_loss(
        TokenLogprobs(
            current=current[mask], behaviour=batch["behaviour_logprobs"][mask], proximal=current[mask].detach()
        ),
        advantages=batch["advantages"][rows],
        entropy=entropy[mask],
        config=loss,
    )
    total = (weights[rows] * token_loss).sum()
    total.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return total.item(), checkpoint_names(model.config.model_type, grads)


def checkpoint_names(family, tensors):
    """Tensors of a transformers model by the names in its checkpoints, one for each expert."""
    tensors = per_expert(tensors)
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
    return max(((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=1e-12)).item() for n in theirs)


def distance(ours, theirs):
    """|ours - theirs| / |theirs|, all tensors taken as one vector."""
    assert ours.keys() == theirs.keys()
    squares = torch.tensor([[((ours[n] - t).double() ** 2).sum(), (t.double() ** 2).sum()] for n, t in theirs.items()])
    difference, norm = squares.sum(0).sqrt().tolist()
    return difference / norm
