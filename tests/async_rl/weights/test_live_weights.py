"""Checksums of live parameters, and the changes that a load must make."""

import pytest
import torch

from async_rl.weights import checksum as checksum_module
from async_rl.weights.checksum import checksum, model_checksums
from async_rl.weights.digest import WHOLE_MODEL, WeightsDigest, module_of
from async_rl.weights.live import LiveWeights

NAMES = (
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn.q_proj.weight", "input_layernorm.weight")),
)


def tensors(*, version, dtype=torch.float32):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(8, generator=generator).to(dtype) for name in NAMES}


def published(given):
    digest = WeightsDigest()
    for name, tensor in given.items():
        digest.update(name, tensor)
    return digest.modules()


def live(*ranks):
    return [{name: checksum(tensor) for name, tensor in rank.items()} for rank in ranks]


def holding(given, **options):
    return LiveWeights(**{"dtype": "float32", "published": published(given), "ranks": live(given)} | options)


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
@pytest.mark.parametrize("size", [3, 256, 5000, 70_001])
def test_checksum_sees_every_bit_and_every_exchange(dtype, size):
    given = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    same = checksum(given)
    assert checksum(given.clone()) == same == checksum(torch.cat([given[:1], given])[1:])
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


def load(held, given, *ranks):
    """The modules that a load of `given` left unchanged, if the engine then holds `ranks`."""
    return held.replace(published(given), live(*ranks or (given,)))


def test_live_weights_accept_loads_that_changed_the_parameters():
    held = holding(tensors(version=0))
    before = held.checksum
    assert load(held, tensors(version=1)) == []
    assert held.checksum != before
    assert load(held, tensors(version=0)) == []
    assert held.checksum == before


def test_live_weights_find_the_modules_that_a_load_left_out():
    held, given = holding(tensors(version=0)), tensors(version=1)
    assert set(load(held, given, tensors(version=0))) == {WHOLE_MODEL, *map(module_of, NAMES)}
    half = tensors(version=0) | {name: given[name] for name in NAMES[: len(NAMES) // 2]}
    missing = {f"model.layers.{part}" for part in ("0.input_layernorm", "1.self_attn", "1.input_layernorm")}
    assert set(load(held, given, half)) == missing
    assert load(held, tensors(version=0)) == [], "refused loads are not recorded"


def test_live_weights_find_a_version_that_was_loaded_again():
    held = holding(tensors(version=0))
    assert load(held, tensors(version=1)) == []
    assert WHOLE_MODEL in load(held, tensors(version=2), tensors(version=1))


def test_live_weights_accept_frozen_tensors_and_an_update_of_nothing():
    held, frozen = holding(tensors(version=0)), tensors(version=0) | {NAMES[1]: torch.zeros(8)}
    assert load(held, frozen) == []
    assert load(held, frozen) == []


def test_live_weights_accept_a_change_on_one_rank_alone():
    first, second = tensors(version=0), tensors(version=1)
    assert load(holding(first, ranks=live(first, second)), second, second, second) == []


def test_live_weights_distinguish_ranks_that_trade_places():
    first, second = tensors(version=0), tensors(version=1)
    one, other = (holding(first, ranks=live(*ranks)) for ranks in ((first, second), (second, first)))
    assert one.checksum != other.checksum


def test_live_weights_accept_equal_values_that_are_published_in_another_dtype():
    start = tensors(version=0, dtype=torch.bfloat16)
    wide = {name: tensor.float() for name, tensor in start.items()}
    held = holding(start, ranks=live(wide))
    assert load(held, wide) == []
    assert WHOLE_MODEL in load(held, tensors(version=1), wide)


@pytest.mark.parametrize(("dtype", "refused"), [(torch.float32, False), (torch.bfloat16, True)])
def test_live_weights_ignore_changes_that_rounding_may_hide(dtype, refused):
    before = tensors(version=0, dtype=dtype)
    assert bool(load(holding(before, dtype="bfloat16"), tensors(version=1, dtype=dtype), before)) == refused


def test_model_checksums_are_of_parameters_and_persistent_buffers():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.empty = torch.nn.Parameter(torch.empty(0))
    model.register_buffer("cache", torch.ones(4), persistent=False)
    before = model_checksums(model)
    layer, norm = [f"0.{name}" for name in ("weight", "bias")], ("weight", "bias", "running_mean", "running_var")
    assert set(before) == {*layer, *(f"1.{name}" for name in norm), "1.num_batches_tracked"}
    model[1].running_mean += 1
    after = model_checksums(model)
    assert {name for name in before if before[name] != after[name]} == {"1.running_mean"}


@pytest.mark.parametrize("number", [0, 1, 3])
def test_checksum_is_of_the_values_not_of_their_strides(number):
    strided = torch.arange(8, dtype=torch.bfloat16)[::2][:number]
    assert checksum(strided) == checksum(strided.clone())


def test_weights_of_the_version_before_the_last_are_found():
    """A staged load that changes nothing exchanges them for the served ones."""
    first, second, third = (tensors(version=version) for version in range(3))
    loaded = holding(first)
    assert loaded.replace(published(second), live(second)) == []
    assert set(loaded.replace(published(third), live(first))) == set(published(third))
    assert loaded.replace(published(third), live(third)) == []
    assert loaded.replace(published(first), live(first)) == [], "the same weights again"
