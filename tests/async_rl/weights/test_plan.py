"""The plan of a publish: which tensor is in which bucket, from which rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.weights.plan import TensorSpec, plan_buckets


def spec(name, *shape, dtype="bfloat16"):
    return TensorSpec(name, dtype, shape)


@st.composite
def owned_units(draw):
    """Units of up to four ranks, over up to six layers."""
    owned = {rank: [] for rank in range(draw(st.integers(1, 4)))}
    for number in range(draw(st.integers(1, 40))):
        layer = draw(st.sampled_from(["embed_tokens", *(f"layers.{i}" for i in range(6)), "norm"]))
        tensors = [
            spec(f"model.{layer}.{number}.{i}", draw(st.integers(1, 50))) for i in range(draw(st.integers(1, 3)))
        ]
        owned[draw(st.sampled_from(sorted(owned)))].append(tuple(tensors))
    return owned


@given(owned_units(), st.integers(1, 300), st.randoms())
def test_plan_has_every_tensor_once_in_bounded_buckets_of_its_owner(owned, bucket_bytes, random):
    plan = plan_buckets(owned, bucket_bytes=bucket_bytes)
    names = [tensor.name for bucket in plan for tensor in bucket.tensors]
    assert sorted(names) == sorted(t.name for units in owned.values() for unit in units for t in unit)
    assert [bucket.number for bucket in plan] == list(range(len(plan)))
    for bucket in plan:
        assert all(unit in owned[bucket.owner] for unit in bucket.units)
        assert sum(tensor.num_bytes for tensor in bucket.tensors) <= bucket_bytes or len(bucket.units) == 1
        places = [unit[0].place for unit in bucket.units]
        assert places == sorted(places)
    starts = [bucket.tensors[0].place for bucket in plan]
    assert starts == sorted(starts)
    for units in owned.values():
        random.shuffle(units)
    assert plan_buckets(dict(reversed(owned.items())), bucket_bytes=bucket_bytes) == plan


def test_plan_follows_the_layers_by_number():
    names = ["model.layers.10.a", "model.norm", "model.layers.9.a", "model.embed_tokens", "lm_head"]
    plan = plan_buckets({0: [(spec(name, 1),) for name in names]}, bucket_bytes=1)
    assert [t.name for bucket in plan for t in bucket.tensors] == [names[3], names[2], names[0], names[4], names[1]]
    dtypes = ("float32", "bfloat16", "float8_e4m3fn")
    assert [spec("a", 2, 3, dtype=dtype).num_bytes for dtype in dtypes] == [24, 12, 6]


def test_plan_refuses_a_tensor_with_two_owners():
    with pytest.raises(ValueError, match=r"two ranks own model\.norm"):
        plan_buckets({rank: [(spec("model.norm", 4),)] for rank in range(2)})
