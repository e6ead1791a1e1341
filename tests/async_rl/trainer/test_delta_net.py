"""Gated delta nets over packed rows, trees and context ranks are the recurrence by definition, token by token."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.trainer.batch.chains import chains_of
from async_rl.trainer.batch.forest import Forest
from async_rl.trainer.batch.micro_batch import Coordinates, pack_rows
from async_rl.trainer.model.delta_net import GatedDeltaNet
from tests.helpers.forests import branching, forest_of_lists

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore")]

HEADS, VALUES, KEY, VALUE, TAPS, EPS = 2, 2, 3, 5, 4, 1e-6
CHANNELS = 2 * KEY + VALUES * VALUE


def weights(dtype=torch.float64):
    """conv_weight, A_log, dt_bias and norm_weight."""
    shapes = ((HEADS * CHANNELS, 1, TAPS), (HEADS * VALUES,), (HEADS * VALUES,), (VALUE,))
    return [torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def mixed(of_heads, parameters, chains):
    """The layer between its projections, on one rank with all rows of the context ranks."""
    conv, rate, shift, norm = parameters
    module = SimpleNamespace(
        sizes=(KEY, KEY, VALUES * VALUE), values=VALUES, conv_weight=conv, A_log=rate, dt_bias=shift, norm_weight=norm
    )
    module.context_group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    module.config = SimpleNamespace(layernorm_epsilon=EPS)
    return GatedDeltaNet._mix(module, of_heads, chains)


def by_definition(of_heads, parameters):
    """The layer between its projections for the tokens [t, heads, ...] of one sequence."""
    conv, rate, shift, norm = parameters
    conv, rate, shift = conv.view(HEADS, CHANNELS, TAPS), rate.view(HEADS, VALUES), shift.view(HEADS, VALUES)
    state = of_heads.new_zeros(HEADS, VALUES, KEY, VALUE)
    outputs = []
    for t in range(len(of_heads)):
        _, z, b, a = of_heads[t].split([CHANNELS, VALUES * VALUE, VALUES, VALUES], dim=-1)
        seen = [conv[..., TAPS - 1 - back] * of_heads[t - back, :, :CHANNELS] for back in range(min(t + 1, TAPS))]
        q, k, v = F.silu(sum(seen)).split([KEY, KEY, VALUES * VALUE], dim=-1)
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        state = state * torch.exp(-rate.exp() * F.softplus(a + shift))[..., None, None]
        error = v.view(HEADS, VALUES, VALUE) - torch.einsum("hk,hvkc->hvc", k, state)
        state = state + torch.einsum("hk,hvc->hvkc", k, error * b.sigmoid()[..., None])
        out = torch.einsum("hk,hvkc->hvc", q, state) * KEY**-0.5
        out = out / (out.square().mean(-1, keepdim=True) + EPS).sqrt() * norm
        outputs.append(out.flatten(1) * F.silu(z))
    return torch.stack(outputs)


@settings(max_examples=25)
@given(
    lists=branching(),
    shares=st.booleans(),
    packing=st.booleans(),
    places=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3)]),
    largest=st.sampled_from([1, 2, 5, 64]),
)
def test_any_packing_is_the_recurrence_of_each_sequence(lists, shares, packing, places, largest):
    tensor, context = places
    forest = forest_of_lists(lists) if shares else Forest.separate([len(each) for each in lists])
    at = [Coordinates(tensor=tensor, context=context, context_rank=rank) for rank in range(context)]
    of_ranks = [pack_rows(forest, at=each, packing=packing or shares) for each in at]
    chains = chains_of(forest, at=at[-1], packing=packing or shares, earlier=TAPS - 1, largest=largest)
    rows = torch.stack([each.token_row + rank * len(each) for rank, each in enumerate(of_ranks)])
    rows = rows.gather(0, torch.stack([each.token_row for each in of_ranks]).argmax(0)[None])[0]
    of_heads = torch.randn(sum(map(len, of_ranks)), HEADS, CHANNELS + VALUES * (VALUE + 2), dtype=torch.float64)
    of_heads.requires_grad_()
    parameters = weights()
    found = mixed(of_heads, parameters, chains)[rows]
    expected = torch.cat([by_definition(of_heads[own], parameters) for own in rows.split([*map(len, lists)])])
    factors = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * factors).sum(), [of_heads, *parameters]) for out in (found, expected)]
    for ours, exact in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        # Norms of outputs near zero and the solved system amplify roundings; a wrong row changes some value by 1e-3.
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-8 * max(1.0, exact.abs().max().item()))


def test_states_and_sums_are_float32_in_bfloat16():
    tokens, g = 300, torch.Generator().manual_seed(0)
    of_heads = torch.randn(tokens, HEADS, CHANNELS + VALUES * (VALUE + 2), generator=g).bfloat16()
    parameters = [x.detach() for x in weights(torch.bfloat16)]
    forest = Forest.separate([tokens])
    found = mixed(of_heads, parameters, chains_of(forest, at=Coordinates(), earlier=TAPS - 1))
    assert found.dtype == torch.bfloat16
    single = mixed(
        of_heads.float(), [x.float() for x in parameters], chains_of(forest, at=Coordinates(), earlier=TAPS - 1)
    )
    assert torch.equal(found, single.bfloat16()), "only the output is rounded"


def test_rows_of_a_shared_prefix_are_computed_once():
    lists = [[0] * 130 + [tail] for tail in (1, 2, 3)]
    shared = chains_of(forest_of_lists(lists), at=Coordinates(), earlier=TAPS - 1)
    assert shared.waves == (1, 1, 1, 3)
    assert [slots.row.tolist() for slots in shared.continued] == [[0], [0], [0, 0, 0]]
    separate = chains_of(Forest.separate([131] * 3), at=Coordinates(), earlier=TAPS - 1)
    assert separate.waves == (3, 3, 3)
