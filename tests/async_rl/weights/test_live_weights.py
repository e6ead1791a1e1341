"""Checksums and sums of live parameters, and the published tensors that a load must bring into them."""

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from async_rl.weights import checksum as checksum_module
from async_rl.weights.checksum import checksum, content, model_contents, sums_for, value_sums
from async_rl.weights.digest import module_of
from async_rl.weights.live import LiveWeights
from tests.helpers.live import without_equation


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.3.mlp.experts.5.up_proj.weight", "model.layers.3.mlp"),
        ("model.layers.13.mlp.experts.routed_experts.w13_weight", "model.layers.13.mlp"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm"),
        ("model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("layers.2.attention.wq.weight", "layers.2.attention"),
    ],
)
def test_module_of_gives_engine_and_checkpoint_names_one_module(name, module):
    assert module_of(name) == module


@pytest.fixture(params=["of the host", "of a device"])
def contents(request, monkeypatch):
    """Checksums over the bytes of a tensor, and over the sums that a device computes."""
    if request.param == "of a device":
        monkeypatch.setattr(checksum_module, "_all_bytes", checksum_module._sums)


@pytest.mark.usefixtures("contents")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 256, 70_001])
def test_checksum_sees_every_bit_and_every_exchange(dtype, size):
    given = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    same = checksum(given)
    assert checksum(given.clone()) == same == checksum(torch.cat([given[:1], given])[1:])
    assert checksum(given[::2]) == checksum(given[::2].clone()), "of the values, not of their strides"
    last = given.clone()
    last[-1] = -last[-1]
    exchanged = given.clone()
    exchanged[[0, size // 2]] = given[[size // 2, 0]]
    ends = given.clone()
    ends[[0, size - 1]] = given[[size - 1, 0]]
    assert len({same, checksum(last), checksum(exchanged), checksum(ends), checksum(given.reshape(1, -1))}) == 5


@pytest.mark.usefixtures("contents")
def test_checksum_sees_columns_and_rows_that_trade_places():
    given = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    others = [given.flip(0), given.flip(1), given.roll(1, 0), given.roll(1, 1), given[torch.randperm(64)]]
    assert len({checksum(t.contiguous()) for t in (given, *others)}) == 6


EXPERTS, LAYERS = 4, 2


def checkpoint(*, version, dtype=torch.float32, same=(), ones=(), zeros=()):
    """Tensors with Hugging Face names. same, ones, zeros: parts of names; those of `same` are of version 0."""
    names = {"model.embed_tokens.weight": (20, 8), "lm_head.weight": (20, 8), "model.norm.weight": (8,)}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        names |= {f"{attention}.{name}_proj.weight": (n, 8) for name, n in (("q", 8), ("k", 4), ("v", 4), ("o", 8))}
        names |= {f"{attention}.{name}_proj.bias": (n,) for name, n in (("q", 8), ("k", 4), ("v", 4))}
        names |= {f"{attention}.{name}_norm.weight": (4,) for name in "qk"}
        names |= {f"model.layers.{layer}.input_layernorm.weight": (8,), f"{mlp}.gate.weight": (EXPERTS, 8)}
        for expert in range(EXPERTS):
            for name, shape in (("gate", (12, 8)), ("up", (12, 8)), ("down", (8, 12))):
                names[f"{mlp}.experts.{expert}.{name}_proj.weight"] = shape
    generators = {new: torch.Generator().manual_seed(new) for new in (0, version)}
    made = {new: {n: torch.randn(s, generator=generators[new]) for n, s in names.items()} for new in generators}
    held = {name: made[0 if any(part in name for part in same) else version][name] for name in names}
    for value, parts in ((1.0, ones), (0.0, zeros)):
        held |= {name: torch.full_like(held[name], value) for name in names if any(part in name for part in parts)}
    return {name: tensor.to(dtype) for name, tensor in held.items()}


def engine(given, *, ranks=1, kv_heads=2, dtype=None):
    """Parameters of each rank as an engine holds them: fused, split, padded, packed and in another order."""
    given = {name: tensor.to(dtype or tensor.dtype) for name, tensor in given.items()}
    return [rank_of(given, rank, ranks=ranks, kv_ranks=min(ranks, kv_heads)) for rank in range(ranks)]


def rank_of(given, rank, *, ranks, kv_ranks):
    def part(name, dim=0, of=ranks):
        return given[name].chunk(of, dim)[rank * of // ranks]

    held = {
        name: torch.cat([part(name), torch.zeros(3, 8)]) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    held["model.norm.weight"] = given["model.norm.weight"]
    for layer in range(LAYERS):
        at, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for kind in ("weight", "bias"):
            of = {"q": ranks, "k": kv_ranks, "v": kv_ranks}
            held[f"{at}.qkv_proj.{kind}"] = torch.cat([part(f"{at}.{n}_proj.{kind}", of=c) for n, c in of.items()])
        held[f"{at}.o_proj.weight.packed"] = part(f"{at}.o_proj.weight", 1).t().flatten()
        for name in (f"{at}.q_norm.weight", f"{at}.k_norm.weight", f"{mlp}.gate.weight"):
            held[name] = given[name]
        held[f"model.layers.{layer}.input_layernorm.weight"] = given[f"model.layers.{layer}.input_layernorm.weight"]
        experts = [
            [part(f"{mlp}.experts.{e}.{name}_proj.weight", int(name == "down")) for name in ("gate", "up", "down")]
            for e in range(EXPERTS)
        ]
        held[f"{mlp}.experts.w13_weight"] = torch.stack([torch.cat([g, u]).flip(1) for g, u, _ in experts])
        held[f"{mlp}.experts.w2_weight"] = torch.stack([down.t() for *_, down in experts])
    return held


def live(ranks):
    return [{name: content(tensor) for name, tensor in rank.items()} for rank in ranks]


def sums(given, *, half=None):
    model = torch.nn.Linear(1, 1, dtype=half)
    return {name: sums_for(model)(tensor) for name, tensor in given.items()}


def holding(given, **options):
    return LiveWeights(published=sums(given, half=options.get("dtype")), ranks=live(engine(given, **options)))


def load(held, given, taken=None, **options):
    """Parameters that a load of `given` leaves wrong, if the engine takes the tensors `taken`."""
    return held.replace(sums(given, half=options.get("dtype")), live(engine(taken or given, **options)))


def parameters_in(wrong):
    return {text.split(" on rank")[0] for text in wrong}


LAYOUTS = [{}, {"ranks": 2}, {"ranks": 4}, {"ranks": 2, "dtype": torch.bfloat16}]


@pytest.mark.parametrize("options", LAYOUTS)
def test_each_parameter_has_an_equation_and_good_loads_are_accepted(options):
    held = holding(checkpoint(version=0), **options)
    assert without_equation(held) == []
    before = held.checksum
    for version in (1, 2, 2, 0):
        assert load(held, checkpoint(version=version), **options) == []
        assert (held.checksum == before) == (version == 0)
    for _ in range(2):
        assert load(held, checkpoint(version=1, same=("experts", "q_norm")), **options) == [], "some need not change"


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("start", [{}, {"ones": ("norm",)}], ids=["random", "as initialised"])
def test_a_single_published_tensor_that_did_not_come_is_found_and_named(options, start):
    old, new = checkpoint(version=0, **start), checkpoint(version=1)
    held = holding(old, **options)
    for name in new:
        wrong = load(held, new, new | {name: old[name]}, **options)
        assert wrong and all(module_of(text.split(" on ")[0]).startswith(module_of(name)[:15]) for text in wrong), name
    assert load(held, new, **options) == [], "refused loads are not recorded"
    for name in new:
        assert load(held, checkpoint(version=2), checkpoint(version=2) | {name: new[name]}, **options), name


@pytest.mark.parametrize("options", LAYOUTS)
def test_biases_that_start_at_zero_are_learnt_when_they_differ_and_found_if_they_stay(options):
    old, new = checkpoint(version=0, zeros=("bias",)), checkpoint(version=1)
    held = holding(old, **options)
    assert len(parameters_in(load(held, new, new | {n: t for n, t in old.items() if "bias" in n}, **options))) == LAYERS
    assert load(held, checkpoint(version=1, zeros=("bias",)), **options) == []
    assert load(held, new, **options) == []
    assert load(held, checkpoint(version=2), **options) == []
    stale = checkpoint(version=2) | {n: t for n, t in new.items() if "k_proj.bias" in n}
    assert len(parameters_in(load(held, checkpoint(version=2), stale, **options))) == LAYERS


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("layers.0.mlp.experts.0.", "layers.0.mlp.experts.1."),
        ("layers.0.mlp.experts.2.down_proj", "layers.1.mlp.experts.2.down_proj"),
        ("layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"),
        ("self_attn.q_norm", "self_attn.k_norm"),
        ("model.embed_tokens", "lm_head"),
    ],
)
def test_tensors_in_the_place_of_others_are_found(options, one, other):
    held, new = holding(checkpoint(version=0), **options), checkpoint(version=1)
    traded = {name.replace(one, "<>").replace(other, one).replace("<>", other): t for name, t in new.items()}
    assert load(held, new, traded, **options)


@pytest.mark.parametrize("part", ["w13_weight", "w2_weight", "qkv_proj.weight", "o_proj", "embed_tokens"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_stayed_old_on_one_rank_is_found(part, rank):
    held, new = holding(checkpoint(version=0), ranks=2), checkpoint(version=1)
    ranks = engine(new, ranks=2)
    ranks[rank] |= {n: t for n, t in engine(checkpoint(version=0), ranks=2)[rank].items() if part in n}
    wrong = held.replace(sums(new), live(ranks))
    assert wrong and all(part in text and "rank 0 + 1" in text for text in wrong)


def test_a_single_old_value_is_found_even_if_the_parameter_changed():
    held, new = holding(checkpoint(version=0)), checkpoint(version=1)
    (rank,) = engine(new)
    name = "model.layers.1.mlp.experts.w13_weight"
    rank[name] = rank[name].clone()
    rank[name][2, 3, 4] += 1e-3
    (text,) = held.replace(sums(new), live([rank]))
    gate, up = (f"model.layers.1.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up"))
    assert text == f"{name}[2] on rank 0, made of {gate}, {up}"


def test_expert_ranks_hold_whole_experts_and_each_has_an_equation():
    def spread(given):
        (whole,) = engine(given)
        return [{n: t[half] if ".experts." in n else t for n, t in whole.items()} for half in (slice(2), slice(2, 4))]

    old, new = checkpoint(version=0), checkpoint(version=1)
    held = LiveWeights(published=sums(old), ranks=live(spread(old)))
    assert without_equation(held) == []
    stale = new | {n: t for n, t in old.items() if "layers.0.mlp.experts.3.up" in n}
    (text,) = held.replace(sums(new), live(spread(stale)))
    assert text.startswith("model.layers.0.mlp.experts.w13_weight[1] on rank 1")
    assert held.replace(sums(new), live(spread(new))) == []


def test_an_empty_slot_of_a_rank_that_takes_an_expert_gets_its_equation():
    def replace(held, expert, *slots):
        ranks = [{"mlp.w2": (f"{slot}", [slot])} for slot in slots]
        return held.replace({"mlp.empty": [[0]], "mlp.down": [[expert]]}, ranks)

    published = {"mlp.empty": [[0]], "mlp.down": [[5]]}
    held = LiveWeights(published=published, ranks=[{"mlp.w2": ("0", [0])}, {"mlp.w2": ("5", [5])}])
    assert replace(held, 7, 7, 7) == [], "the first rank has a copy of the expert now"
    assert replace(held, 8, 8, 8) == [], "the slot is no longer empty in the last two loads"
    assert replace(held, 9, 8, 9), "the copy is old"
    assert replace(held, 9, 9, 9) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_that_are_published_wider_are_compared_as_the_engine_rounds_them(ranks):
    """A float32 trainer that starts from bfloat16, and engines whose routers stay in float32."""
    half = {"dtype": torch.bfloat16, "ranks": ranks}
    start = checkpoint(version=0, dtype=torch.bfloat16)
    held = holding(start, **half)
    wide = {name: tensor.float() for name, tensor in start.items()}
    assert load(held, wide, **half) == []
    tiny = {name: tensor * (1 + 1e-6) for name, tensor in wide.items()}
    assert load(held, tiny, **half) == [], "rounding hides the change"
    new = checkpoint(version=1)
    wrong = load(held, new, new | {n: t for n, t in wide.items() if "gate.weight" in n}, **half)
    assert parameters_in(wrong) == {f"model.layers.{layer}.mlp.gate.weight" for layer in range(LAYERS)}
    router = {name: tensor for name, tensor in new.items() if name.endswith("mlp.gate.weight")}
    mixed = live([rank | router for rank in engine(new, **half)])
    assert held.replace(sums(new, half=torch.bfloat16), mixed) == []


def test_a_parameter_without_an_equation_has_to_change_with_the_tensors_that_are_left():
    def computed(given):
        ranks = engine(given)
        for rank in ranks:
            rank["model.layers.0.mlp.gate.weight"] = rank["model.layers.0.mlp.gate.weight"] * 2
            rank["model.layers.0.self_attn.scale"] = torch.full((1,), 0.3)
        return live(ranks)

    old, new, newest = (checkpoint(version=version) for version in range(3))
    held = LiveWeights(published=sums(old), ranks=computed(old))
    assert without_equation(held) == ["model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.scale"]
    gate = "model.layers.0.mlp.gate.weight"
    assert held.replace(sums(new), computed(new | {gate: old[gate]})) == [gate]
    assert held.replace(sums(new), computed(new)) == []
    assert held.replace(sums(newest), computed(newest | {gate: old[gate]})) == [gate], "of the load before the last"
    assert held.replace(sums(new | {gate: old[gate]}), computed(new | {gate: old[gate]})) == []


def test_the_halves_of_a_tensor_in_two_parameters_have_an_equation_together():
    def split(given):
        (rank,) = engine(given)
        for layer in range(LAYERS):
            whole = rank.pop(f"model.layers.{layer}.mlp.gate.weight")
            rank |= {f"model.layers.{layer}.mlp.w_uk": whole[:, :3].t(), f"model.layers.{layer}.mlp.w_uv": whole[:, 3:]}
        return live([rank])

    old, new = checkpoint(version=0), checkpoint(version=1)
    held = LiveWeights(published=sums(old), ranks=split(old))
    assert without_equation(held) == []
    gate = "model.layers.1.mlp.gate.weight"
    (text,) = held.replace(sums(new), split(new | {gate: old[gate]}))
    assert text == f"model.layers.1.mlp.w_uk and model.layers.1.mlp.w_uv on rank 0, made of {gate}"


def test_weights_of_the_version_before_the_last_are_found():
    """A staged load that changes nothing exchanges them for the served ones."""
    held = holding(checkpoint(version=0))
    assert load(held, checkpoint(version=1)) == []
    assert load(held, checkpoint(version=2), checkpoint(version=0))
    assert load(held, checkpoint(version=2)) == []


def test_replicas_with_ranks_that_trade_places_have_other_checksums():
    ranks = live(engine(checkpoint(version=0), ranks=2))
    one, other = (LiveWeights(published={}, ranks=given) for given in (ranks, ranks[::-1]))
    assert one.checksum != other.checksum


@drawn(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    block=st.integers(1, 40),
    data=st.data(),
)
def test_value_sums_add_up_over_parts_and_ignore_order_zeros_and_dtype(shape, dtype, block, data):
    given = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))).to(dtype)
    total = sum(value_sums(given))
    assert len(value_sums(given)) == (shape[0] if len([n for n in shape if n > 1]) == 3 else 1)
    flat = given.flatten()
    at = data.draw(st.integers(0, len(flat)))
    assert sum(value_sums(flat[:at])) + sum(value_sums(flat[at:])) == total
    assert value_sums(torch.cat([flat[torch.randperm(len(flat))].float(), torch.zeros(3)])) == [total]
    changed = flat.clone()
    changed[data.draw(st.integers(0, len(flat) - 1))] *= -1
    assert value_sums(changed) != [total]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_module, "_BLOCK", block)
        assert sum(value_sums(given)) == total


def test_model_contents_are_of_parameters_and_persistent_buffers_without_sums():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.empty = torch.nn.Parameter(torch.empty(0))
    model.register_buffer("cache", torch.ones(4), persistent=False)
    before = model_contents(model)
    layer, norm = [f"0.{name}" for name in ("weight", "bias")], ("weight", "bias", "running_mean", "running_var")
    assert set(before) == {*layer, *(f"1.{name}" for name in norm), "1.num_batches_tracked"}
    assert {name for name, (_, sums) in before.items() if sums} == {*layer, "1.weight", "1.bias"}
    model[1].running_mean += 1
    after = model_contents(model)
    assert {name for name in before if before[name] != after[name]} == {"1.running_mean"}
