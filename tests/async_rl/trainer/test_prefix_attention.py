"""Attention over shared prefixes and context ranks is attention by definition, without a tensor of queries x keys."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from async_rl.trainer.batch.forest import Forest
from async_rl.trainer.batch.micro_batch import Coordinates, pack_rows
from async_rl.trainer.model import prefix_attention
from async_rl.trainer.model.prefix_attention import attend_to_prefix
from tests.helpers import numerics
from tests.helpers.forests import branching, forest_of_lists

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@dataclass(frozen=True)
class Layer:
    window: int | None = None
    sinks: bool = False
    heads: int = 2
    groups: int = 1
    channels: int = 8
    value_channels: int = 8

    @property
    def scale(self):
        return self.channels**-0.5

    def tensors(self, rows):
        """Query, key and value [rows, heads, channels], sinks [heads]."""
        torch.manual_seed(0)
        sizes = (self.heads, self.channels), (self.groups, self.channels), (self.groups, self.value_channels)
        qkv = [torch.randn(rows, *size).requires_grad_() for size in sizes]
        return [*qkv, *([torch.randn(self.heads).requires_grad_()] if self.sinks else [])]

    def dense(self, q, k, v, sinks=None, *, allowed):
        """Attention [rows, heads, value channels] by its definition; allowed: bool [queries, keys]."""
        k, v = (x.repeat_interleave(self.heads // self.groups, dim=1) for x in (k, v))
        scores = torch.einsum("qhc,khc->hqk", q, k) * self.scale
        scores = scores.masked_fill(~allowed, -torch.inf)
        if sinks is not None:
            scores = torch.cat((sinks[:, None, None].expand(-1, len(q), 1), scores), dim=-1)
        return torch.einsum("hqk,khc->qhc", scores.softmax(-1)[..., -len(k) :], v)

    def in_reach(self, queries, keys):
        """bool [queries, keys] from positions."""
        distance = queries[:, None] - keys
        return (distance >= 0) & (distance < (self.window or len(keys) + 1))

    def module(self, context):
        """RowAttention on one of `context` ranks, without its sinks."""
        from async_rl.trainer.model import attention

        config = SimpleNamespace(
            multi_latent_attention=False,
            window_size=self.window and (self.window - 1, 0),
            window_attn_skip_freq=None,
            softmax_type="learnable" if self.sinks else "vanilla",
            num_attention_heads=self.heads,
            tensor_model_parallel_size=1,
            params_dtype=torch.float32,
        )
        group = SimpleNamespace(size=lambda: context)
        with mock.patch.multiple(attention, context_group=lambda: group, tensor_group=lambda: group):
            return attention.RowAttention(config, 1, None, "self", softmax_scale=self.scale)


LAYERS = {
    "plain": Layer(),
    "groups": Layer(heads=4, groups=2),
    "latent": Layer(groups=2, value_channels=4),
    "window": Layer(window=3),
    "sinks": Layer(sinks=True),
    "window and sinks": Layer(window=5, sinks=True),
}
GATHER = "async_rl.trainer.model.attention.gather_from_sequence_parallel_region"


def on_path(forest, nodes, real):
    """bool [rows, rows], whether the node of the second row is that of the first, or before it; padding has no path."""
    parents = [*forest.parent.tolist(), -1]
    paths = []
    for node in range(len(parents)):
        paths.append({node} | (paths[parents[node]] if parents[node] >= 0 else set()))
    reach = torch.tensor([[other in path for other in range(len(parents))] for path in paths])
    return reach[nodes][:, nodes] & (real | (nodes[:, None] == nodes))


def on_all_ranks(layer, tensors, of_ranks):
    """Attention of the rows of each context rank, rank after rank; q, k and v have the rows of all ranks."""
    q, k, v, *sinks = tensors
    module = layer.module(len(of_ranks))
    if sinks:
        del module.softmax_offset
        module.softmax_offset = sinks[0]
    outs = []
    for rows, own in zip(of_ranks, zip(*(x.chunk(len(of_ranks)) for x in (q, k, v)), strict=True), strict=True):
        whole = iter((k, v))
        with mock.patch(GATHER, lambda _own, group, whole=whole: next(whole)):
            outs.append(module.attend(*own, rows))
    return torch.cat(outs)


def assert_as_exact(found, expected, *, tensors, weights, terms):
    """Outputs and gradients of the inputs in float32 and float64; terms: summands of a score and of an output."""
    exact_inputs, exact_out = expected
    pairs = [(found, exact_out)]
    gradients = torch.autograd.grad((found * weights).sum(), tensors)
    pairs += zip(gradients, torch.autograd.grad((exact_out * weights).sum(), exact_inputs), strict=True)
    for number, (ours, exact) in enumerate(pairs):
        # A gradient is a product with scores, probabilities and their gradients, each a sum of terms.
        bound = numerics.rounding((3 if number else 1) * terms) * max(exact.abs().max().item(), 1.0)
        numerics.assert_within(numerics.error(ours, exact), bound, f"tensor {number}")


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=25)
@given(
    lists=branching(),
    shares=st.booleans(),
    context=st.integers(1, 4),
    packing=st.booleans(),
    block=st.sampled_from([2, 5, 1024]),
)
def test_attention_on_any_number_of_context_ranks_is_attention_by_definition(
    name, lists, shares, context, packing, block
):
    layer = LAYERS[name]
    forest = forest_of_lists(lists) if shares else Forest.separate([len(each) for each in lists])
    places = [Coordinates(context=context, context_rank=rank) for rank in range(context)]
    of_ranks = [pack_rows(forest, at=at, packing=packing or shares) for at in places]
    nodes, positions, index = (torch.cat([getattr(r, c) for r in of_ranks]) for c in ("nodes", "positions", "index"))
    tensors = layer.tensors(len(nodes))
    exact = [x.detach().double().requires_grad_() for x in tensors]
    allowed = on_path(forest, nodes, index >= 0) & layer.in_reach(positions, positions)
    with mock.patch.object(prefix_attention, "BLOCK", block):
        found = on_all_ranks(layer, tensors, of_ranks)
    expected = layer.dense(*exact, allowed=allowed)
    weights = torch.randn(expected.shape)
    terms = layer.channels + 40
    assert_as_exact(found, (exact, expected), tensors=tensors, weights=weights, terms=terms)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("queries", [700, 1], ids=["many", "one"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_last_queries_attend_to_the_keys_up_to_their_own(name, queries, on_gpu, monkeypatch):
    """For GPUs the calls are others. On the CPU torch computes them with a mask."""
    if on_gpu:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    keys = 1600  # several blocks of the kernels and of BLOCK
    layer = replace(LAYERS[name], window=LAYERS[name].window and 600)
    q, k, v, *sinks = layer.tensors(keys)
    tensors = [q, k, v, *sinks]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = layer.dense(*exact, allowed=layer.in_reach(torch.arange(keys), torch.arange(keys)))[-queries:]
    shaped = [x.transpose(0, 1).unsqueeze(0) for x in (q[-queries:], k, v)]
    monkeypatch.setattr(prefix_attention, "BLOCK", 256)
    found = attend_to_prefix(*shaped, scale=layer.scale, window=layer.window, sinks=sinks[0] if sinks else None)
    found = found.squeeze(0).transpose(0, 1)
    weights = torch.randn(expected.shape)
    assert_as_exact(found, (exact, expected), tensors=tensors, weights=weights, terms=layer.channels + keys)


class LargestStorage(TorchDispatchMode):
    """Elements of the largest storage that an operation returns; views count with their storage."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("name", LAYERS)
def test_no_tensor_has_the_size_of_queries_times_keys(name, rank, monkeypatch):
    monkeypatch.setattr(prefix_attention, "BLOCK", 128)
    layer, tokens, context = replace(LAYERS[name], window=LAYERS[name].window and 200), 8192, 8
    rows = pack_rows(Forest.separate([tokens]), at=Coordinates(context=context, context_rank=rank))
    q, k, v, *_ = layer.tensors(tokens)
    module, whole = layer.module(context), iter((k, v))
    if layer.sinks:
        torch.nn.init.zeros_(module.softmax_offset)
    own = [x.chunk(context)[rank] for x in (q, k, v)]
    with mock.patch(GATHER, lambda _own, group: next(whole)), LargestStorage() as seen:
        module.attend(*own, rows).sum().backward()
    gathered = tokens * layer.groups * layer.channels
    channels = layer.channels + (prefix_attention.SINK_CHANNELS if layer.sinks else 0)
    keys_of_all_heads = max(tokens + 1, len(rows.keys.row)) * layer.heads * channels
    assert gathered <= seen.largest <= keys_of_all_heads < len(rows) * tokens / 16
