"""The value model of a trainer next to one of transformers in float64."""

from types import SimpleNamespace

import numpy as np
import torch

from async_rl.trainer.critic.gae import GAE
from tests.conformance.reference import watched_routers
from tests.helpers import numerics
from tests.parallel.support import checkpoint_names, gather_gradients, gradients, load_reference

GAMMA_LAM = GAE(gamma=0.95, lam=0.9, whiten=False)


def set_head(trainer, *, seed=0):
    """Give the value head weights that are not zero; the same in every layout."""
    draw = torch.Generator().manual_seed(seed)
    head = trainer._critic._head.module
    with torch.no_grad():
        head.weight.copy_(0.2 * torch.randn(head.weight.shape, generator=draw))
        head.bias.fill_(0.3)
    return head


def trunk_gradients(trainer):
    """Gradients of the trunk of the critic by Hugging Face name; collective."""
    critic = trainer._critic
    return gradients(SimpleNamespace(model=critic._trunk or trainer.model))


def head_gradients(trainer):
    """Gradients of the value head, of the last pipeline stage on all ranks; collective."""
    gather_gradients(trainer._critic._head)
    named = trainer._critic._head.module.named_parameters()
    mine = {name: parameter.main_grad.detach().clone() for name, parameter in named}
    ranks = trainer._groups.gather(mine if trainer._groups.is_last_stage else None)
    return next(each for each in ranks if each is not None)


def valued_tokens(trainer, batch):
    """Values, advantages and returns [N] of the tokens of a batch of one update, of all ranks; collective."""
    plan = trainer._planner.policy(batch)
    (update,) = plan.updates
    policy = trainer._micro_batches(batch, update)
    plan, _ = trainer._critic.value(plan, [policy])
    passes, ours = trainer._critic._passes, trainer._critic._planned[update]
    found = {}
    for name, results in (("values", ours.results), ("advantages", policy.results), ("returns", ours.results)):
        columns = [each.columns[name] for each in results] if passes.counts_tokens else []
        found[name] = passes.of_update(ours, columns)
    return SimpleNamespace(plan=plan, **found)


def reference_values(model, batch, head):
    """Value of the state after each token, [S] of [T], and those with a graph; `model` of transformers."""
    weight, bias = (parameter.detach().to(model.dtype) for parameter in (head.weight, head.bias))
    weight.requires_grad_()
    bias.requires_grad_()
    values = []
    for i, length in enumerate(batch["lengths"].tolist()):
        ids = batch["token_ids"][i, :length]
        with watched_routers(model, batch["routed_experts"][i, :length]):
            hidden = model.model(ids[None]).last_hidden_state[0]
        values.append(torch.nn.functional.linear(hidden, weight, bias)[:, 0])
    return values, weight, bias


def reference_gae(values, batch, *, gae=GAMMA_LAM, truncated=()):
    """(values, advantages, returns) of the tokens in the loss; each sequence is a trajectory."""
    before, found = [], []
    for i, of in enumerate(values):
        at = batch["loss_mask"][i].nonzero()[:, 0]
        own = of.detach()[at - 1].tolist()
        later, following, advantages = 0.0, float(of.detach()[-1]) if i in truncated else 0.0, []
        for number, value in enumerate(reversed(own)):
            reward = float(batch["rewards"][i]) if number == 0 else 0.0
            later = reward + gae.gamma * following - value + gae.gamma * gae.lam * later
            following = value
            advantages.append(later)
        before += own
        found += advantages[::-1]
    values, found = np.array(before), np.array(found)
    return values, found, found + values


def reference_update(checkpoint, batch, head, *, truncated=()):
    """Values, advantages, returns, and the gradients of the value loss in float64."""
    model = numerics.float64_model(load_reference(checkpoint))
    with numerics.float64_forward():
        values, weight, bias = reference_values(model, batch, head)
        start, advantages, returns = reference_gae(values, batch, truncated=truncated)
        mask = batch["loss_mask"]
        current = torch.cat([of[own.nonzero()[:, 0] - 1] for of, own in zip(values, mask, strict=True)])
        (0.5 * ((current - torch.from_numpy(returns)) ** 2).mean()).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return SimpleNamespace(
        values=start,
        advantages=advantages,
        returns=returns,
        trunk=checkpoint_names(model, grads),
        head={"weight": weight.grad, "bias": bias.grad},
    )
