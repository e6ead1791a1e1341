"""Router replay of one layer: forced experts, counts, and the experts that a threshold leaves out."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.metrics.registry import metric_of
from async_rl.trainer.batch.training_batch import BatchError
from async_rl.trainer.metrics import routing_metrics, routing_sums
from async_rl.trainer.router_replay import ROUTING_SUMS, LayerReplay, MicroBatchRouting, keep_likely, replayed_tables
from message_queue.tokens import RoutingSpec
from message_queue.training_sequence import RowRun, TrainingSequence
from tests.helpers import numerics

pytestmark = pytest.mark.numerics

ROUNDING = numerics.rounding(16)  # a softmax of 8 scores, some sums and a quotient
EXPERTS, TOP_K = 8, 3
ROUTING = RoutingSpec(layers=(1, 3, 4), num_experts=EXPERTS, top_k=TOP_K)


def top_k(scores, k, num_groups=None, group_topk=None):
    return torch.topk(scores, k, dim=1)


def softmax_router(*, pre_softmax=False):
    return SimpleNamespace(
        score_function="softmax", expert_bias=None, config=SimpleNamespace(moe_router_pre_softmax=pre_softmax)
    )


BIAS = torch.linspace(-1, 1, EXPERTS)
SIGMOID_ROUTER = SimpleNamespace(score_function="sigmoid", expert_bias=BIAS, config=SimpleNamespace())


def routed(scores, table, *, router=None, threshold=0.0, uses=None):
    """(scores, experts, sums) of layer 1 replaying `table`."""
    replay = LayerReplay(router or softmax_router(), layer=1, threshold=threshold)
    uses = torch.ones(len(scores), dtype=torch.int64) if uses is None else uses
    replay.routing = MicroBatchRouting(mode="replay", tables={1: table}, uses=uses)
    given_scores, experts = replay.get_replay_topk(scores, TOP_K, default_compute_topk=top_k)
    sums = replay.routing.sums.get(1)
    return given_scores, experts, sums if sums is None else dict(zip(ROUTING_SUMS, sums.tolist(), strict=True))


def random_case(seed, rows=6):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, EXPERTS, generator=g)
    recorded = torch.rand(rows, EXPERTS, generator=g).topk(TOP_K).indices
    return scores, recorded


@given(st.integers(0, 10_000), st.floats(0, 1) | st.sampled_from([0.0, 1.0]))
def test_replay_keeps_k_experts_of_a_row_and_all_that_are_likely(seed, threshold):
    scores, recorded = random_case(seed)
    probabilities, live = scores.softmax(-1), scores.topk(TOP_K).indices
    experts, refused = keep_likely(recorded, live, probabilities, threshold=threshold)
    floor = threshold * probabilities.gather(1, live).min(1).values
    for row in range(len(scores)):
        chosen, own, held = set(experts[row].tolist()), set(live[row].tolist()), recorded[row].tolist()
        likely = {e for e in held if probabilities[row, e] >= floor[row]}
        assert len(chosen) == TOP_K
        assert likely <= chosen <= likely | own
        assert [e in likely for e in held] == (~refused[row]).tolist()


def test_the_best_live_expert_replaces_a_refused_one():
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.09, 0.01]])
    experts, refused = keep_likely(torch.tensor([[4, 1, 3]]), torch.tensor([[0, 1, 2]]), probabilities, threshold=0.4)
    assert refused.tolist() == [[True, False, False]]
    assert experts.tolist() == [[1, 3, 0]]


def test_replay_forces_recorded_experts_with_the_gradient_of_their_scores():
    scores, recorded = random_case(0)
    scores.requires_grad_()
    chosen, experts, _ = routed(scores, recorded)
    assert torch.equal(experts, recorded)
    chosen.sum().backward()
    assert torch.equal(scores.grad, torch.zeros_like(scores).scatter(1, recorded, 1.0))


def test_counts_are_of_the_tokens_of_each_sequence_and_tell_fallback_from_replay():
    """The second row is shared by 3 sequences, the last is padding."""
    scores = torch.tensor([[4.0, 3, 2, 1, 0, -1, -2, -3]]).repeat(4, 1)
    table = torch.tensor([[0, 1, 2], [0, 1, 7], [-1, -1, -1], [5, 6, 7]])
    _, experts, sums = routed(scores, table, uses=torch.tensor([1, 3, 1, 0]))
    assert experts.tolist() == [[0, 1, 2], [0, 1, 7], [0, 1, 2], [5, 6, 7]]
    p = scores[0].softmax(-1)
    expected = {"agreeing": 3 + 3 * 2, "replayed": 12, "refused": 0, "fallback": 1, "rows": 5}
    assert {name: sums[name] for name in expected} == expected
    assert sums["mass"] == pytest.approx(4 * float(p[0] + p[1]) + float(p[2] + 3 * p[7]), rel=ROUNDING)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_replay_without_gradient_is_the_same_and_not_counted(threshold):
    case = random_case(2)
    with torch.no_grad():
        _, experts, sums = routed(*case, threshold=threshold)
    assert sums is None
    assert torch.equal(routed(*case, threshold=threshold)[1], experts)


def test_refused_experts_are_counted_and_overlap_is_of_the_recorded_ones():
    scores = torch.tensor([[4.0, 3, 2, 1, 0, -1, -2, -9]])
    _, experts, sums = routed(scores, torch.tensor([[7, 0, 3]]), threshold=0.2)
    assert sorted(experts[0].tolist()) == [0, 1, 3]
    assert (sums["refused"], sums["replayed"], sums["agreeing"]) == (1, 3, 1)


@pytest.mark.parametrize(
    ("router", "steered_by"),
    [(SIGMOID_ROUTER, BIAS), (softmax_router(pre_softmax=True), 0.0)],
    ids=["sigmoid", "softmax"],
)
def test_the_mass_of_probabilities_is_their_share_without_the_bias(router, steered_by):
    scores = torch.rand(1, EXPERTS, generator=torch.Generator().manual_seed(3))
    scores = scores / scores.sum()
    sums = routed(scores + steered_by, torch.tensor([[0, 1, 2]]), router=router)[2]
    assert sums["mass"] == pytest.approx(float(scores[0, :3].sum()), rel=ROUNDING)


def test_routing_metrics_are_of_each_layer_and_of_all_and_registered():
    scores = torch.tensor([[4.0, 3, 2, 1, 0, -1, -2, -3]]).repeat(2, 1)
    routing = MicroBatchRouting(mode="replay", tables={}, uses=torch.ones(2, dtype=torch.int64))
    for layer, rows in ((1, [[0, 1, 2], [0, 1, 7]]), (3, [[5, 6, 7], [-1, -1, -1]])):
        replay = LayerReplay(softmax_router(), layer=layer)
        routing.tables[layer], replay.routing = torch.tensor(rows), routing
        replay.get_replay_topk(scores, TOP_K, default_compute_topk=top_k)
    metrics = routing_metrics(routing_sums([routing.sums, {}], layers=(1, 3)), layers=(1, 3))
    assert metrics["routing/overlap"] == pytest.approx(5 / 9)
    assert metrics["routing/overlap_layer1"] == pytest.approx(5 / 6)
    assert metrics["routing/overlap_layer3"] == 0
    assert metrics["routing/fallback_fraction"] == 0.25
    assert metrics["routing/gate_mass_layer3"] == pytest.approx(scores[0].softmax(-1)[5:].sum().item())
    assert metrics["routing/fallback_fraction_layer3"] == 0.5
    assert 0 < metrics["routing/gate_mass_layer3"] < metrics["routing/gate_mass"] < metrics["routing/gate_mass_layer1"]
    assert all(metric_of(key) is not None for key in metrics)
    assert metric_of("loss_layer1") is None and metric_of("routing/overlap_layer") is None


def test_a_layer_without_rows_and_rows_of_another_shape_are_refused():
    scores, recorded = random_case(5)
    replay = LayerReplay(softmax_router(), layer=2)
    replay.routing = MicroBatchRouting(mode="replay", tables={1: recorded}, uses=torch.ones(6, dtype=torch.int64))
    with pytest.raises(BatchError, match="layer 2"):
        replay.get_replay_topk(scores, TOP_K, default_compute_topk=top_k)
    with pytest.raises(BatchError, match=r"\[5, 3\]"):
        routed(scores, recorded[:5])


def sequence_of(rows, *, length, row_runs=None):
    """A sequence of `length` tokens over the rows uint8 [r, L, K]."""
    return TrainingSequence(
        token_ids=np.zeros(length, np.int32),
        runs=(),
        logprobs=np.zeros(0, np.float32),
        rows=rows,
        row_runs=row_runs or (RowRun(len(rows), 0),),
    )


def numbered_rows(length):
    """uint8 [length, 3, K]: the experts of a row follow from position, layer place and choice."""
    experts = np.arange(length)[:, None, None] + 2 * np.arange(3)[:, None] + np.arange(TOP_K)
    return (experts % EXPERTS).astype(np.uint8)


@pytest.mark.parametrize("layers", [(3,), (1, 3), (1, 4), (4, 1), ()])
def test_replayed_rows_are_those_of_the_wanted_layers_and_tokens(layers):
    rows = numbered_rows(4)
    runs = (RowRun(1, 3), RowRun(1, -1), RowRun(2, 3))
    sequences = {4: sequence_of(rows[:2], length=3), 9: sequence_of(rows, length=5, row_runs=runs)}
    of, positions = np.array([0, 0, 0, 1, 1, 1, 1, 2]), np.array([0, 1, 2, 0, 1, 3, 4, 0])
    tables = replayed_tables(sequences, of, positions, routing=ROUTING, layers=layers, to=torch.device("cpu"))
    live = np.array([False, False, True, False, True, False, True, True])
    assert tuple(tables) == layers
    for layer, table in tables.items():
        expected = rows[positions[~live], ROUTING.layers.index(layer)]
        assert table[~torch.from_numpy(live)].tolist() == expected.tolist()
        assert (table[torch.from_numpy(live)] == -1).all()


def test_replayed_rows_of_many_experts_keep_ids_of_two_bytes():
    spec = RoutingSpec(layers=(1,), num_experts=300, top_k=2)
    rows = np.array([[[299, 7]]], np.uint16)
    sequences, cpu = {0: sequence_of(rows, length=2)}, torch.device("cpu")
    tables = replayed_tables(sequences, np.zeros(2, int), np.arange(2), routing=spec, layers=(1,), to=cpu)
    assert tables[1].tolist() == [[299, 7], [-1, -1]]


def with_expert(rows, value):
    rows[1, 2, 0] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (with_expert(numbered_rows(3), EXPERTS), "sequence 9, position 1, layer 4"),
        (with_expert(numbered_rows(3), 6), "duplicate.*position 1, layer 4"),
        (numbered_rows(3)[:, 1:], r"layers \[1, 3, 4\]"),
        (numbered_rows(3).astype(np.uint16), "uint16"),
        (numbered_rows(5), "sequence 9"),
        (numbered_rows(2), "row_runs of sequence 9"),
        (None, "trainer.router_replay"),
    ],
    ids=["range", "duplicate", "layers", "type", "too many", "other runs", "absent"],
)
def test_replayed_rows_that_do_not_fit_are_refused(rows, found):
    good = sequence_of(numbered_rows(3), length=4)
    of, positions = np.repeat([0, 1], 4), np.tile(np.arange(4), 2)
    with pytest.raises(BatchError, match=found):
        sequences = {4: good, 9: replace(good, rows=rows)}
        replayed_tables(sequences, of, positions, routing=ROUTING, layers=(3, 4), to=torch.device("cpu"))


def test_replayed_rows_of_a_layer_that_the_batch_lacks_are_refused():
    with pytest.raises(BatchError, match=r"\[2\].* \[1, 3, 4\]"):
        nothing, cpu = np.zeros(0, int), torch.device("cpu")
        replayed_tables({}, nothing, nothing, routing=ROUTING, layers=(2, 3), to=cpu)
