"""The store of versions returns the bits of each version, and of the current weights after each walk."""

import numpy as np
import pytest
import torch

from async_rl.trainer.old_policy.versions import VersionStore
from tests.parallel.support import MARKS

pytestmark = MARKS


def tensors_of(seed=0, dtype=torch.bfloat16):
    """Weights, a buffer of integers, and bits that no arithmetic keeps."""
    g = torch.Generator().manual_seed(seed)
    special = torch.tensor([float("nan"), -0.0, float("inf"), 1e-40], dtype=dtype)
    return {
        "weight": (torch.randn(64, 33, generator=g) * 0.02).to(dtype),
        "special": special,
        "scalar": torch.tensor(0.5),
        "counts": torch.arange(5),
    }


def bits(tensors):
    return {name: tensor.contiguous().view(-1).view(torch.uint8).clone() for name, tensor in tensors.items()}


def assert_bits(tensors, expected):
    found = bits(tensors)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], of) for name, of in expected.items())


def change(tensors, generator, *, share):
    """Change a share of the values, to any bits."""
    for tensor in tensors.values():
        flat = tensor.view(-1)
        chosen = torch.rand(flat.shape, generator=generator) < share
        flat[chosen] = torch.randn(int(chosen.sum()), generator=generator).to(tensor.dtype)


def stored(count, *, share, dtype=torch.bfloat16, keep=100):
    """(store of the versions 0 to count - 1, its live tensors, bits of each version)."""
    live, g = tensors_of(dtype=dtype), torch.Generator().manual_seed(1)
    store, versions = VersionStore(live, keep=keep), []
    for update in range(count):
        store.add(update)
        versions.append(bits(live))
        if update < count - 1:
            change(live, g, share=share)
    return store, live, versions


@pytest.mark.parametrize("share", [0.0, 0.01, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_walk_loads_the_bits_of_each_version(dtype, share):
    store, live, versions = stored(6, share=share, dtype=dtype)
    assert store.updates == [5, 4, 3, 2, 1, 0]
    with store.walk() as walk:
        for update in store.updates:
            walk.load(update)
            assert_bits(live, versions[update])
    assert_bits(live, versions[-1])


def test_the_weights_are_bit_equal_after_a_thousand_walks_over_changing_versions():
    live, g, rng = tensors_of(), torch.Generator().manual_seed(2), np.random.default_rng(0)
    store, versions = VersionStore(live, keep=8), {}
    for update in range(1000):
        change(live, g, share=0.02)
        store.add(update)
        versions[update] = bits(live)
        chosen = sorted(rng.choice(store.updates, size=min(3, len(store.updates)), replace=False), reverse=True)
        with store.walk() as walk:
            for of in chosen:
                walk.load(of)
                assert_bits(live, versions[of])
        assert_bits(live, versions[update])
    assert store.updates == list(range(999, 990, -1))


def test_an_error_in_a_walk_leaves_the_current_weights():
    store, live, versions = stored(3, share=0.1)
    with pytest.raises(RuntimeError, match="pass"), store.walk() as walk:
        walk.load(0)
        raise RuntimeError("the pass failed")
    assert_bits(live, versions[-1])


def test_other_values_are_loaded_and_taken_back():
    store, live, versions = stored(3, share=0.1)
    with store.walk() as walk:
        newer = dict(walk.tensors(1))
        walk.load(1, newer | {"weight": walk.tensors(0)["weight"]})
        assert_bits(live, versions[1] | {"weight": versions[0]["weight"]})
    assert_bits(live, versions[-1])


def test_versions_older_than_the_bound_and_forgotten_ones_are_not_there():
    store, live, versions = stored(6, share=0.1, keep=2)
    assert store.updates == [5, 4, 3]
    store.forget([4])
    assert store.updates == [5, 3]
    with store.walk() as walk:
        walk.load(3)
        assert_bits(live, versions[3])


def test_a_restored_store_has_the_same_versions():
    store, live, versions = stored(5, share=0.1)
    store.forget([2])
    other = VersionStore({name: tensor.clone() for name, tensor in live.items()}, keep=100)
    other.restore(4, *store.state())
    assert other.updates == store.updates == [4, 3, 1, 0]
    with other.walk() as walk:
        walk.load(0)
        assert_bits(other._live, versions[0])


def test_a_version_takes_at_most_a_twentieth_of_the_model_at_the_usual_learning_rate():
    g = torch.Generator().manual_seed(0)
    master = torch.randn(1 << 20, generator=g) * 0.02
    weight = torch.nn.Parameter(master.clone())
    adam, live = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0), {"weight": master.bfloat16()}
    store = VersionStore(live, keep=8)
    for update in range(6):
        store.add(update)
        weight.grad = torch.randn(weight.shape, generator=g)
        adam.step()
        live["weight"].copy_(weight.detach())
    assert 0 < store.share <= 0.05
