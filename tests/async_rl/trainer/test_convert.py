"""Parts of checkpoint tensors as a rank reads them."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from async_rl.trainer.model.convert import Split, _Reader, load_weights
from async_rl.trainer.model.families import read_shape
from async_rl.weights.model_info import CheckpointError
from tests.helpers import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@dataclass(frozen=True)
class Weight:
    """The parameter that is filled: its number of dimensions, and the one that it is split along."""

    partition_dim: int
    dims: int = 2

    def dim(self):
        return self.dims


def reader(folder, tensors):
    (folder / "model.safetensors").write_bytes(save(tensors))
    return _Reader(folder)


def parts(of, name, weight, size):
    return [of.read(name, weight=weight, split=Split(None, size, rank)) for rank in range(size)]


@given(rows=st.integers(1, 9), columns=st.integers(1, 4), ranks=st.integers(1, 5), dim=st.integers(0, 1))
def test_the_parts_of_all_ranks_are_the_tensor(tmp_path_factory, rows, columns, ranks, dim):
    whole = torch.arange(rows * columns * 1.0).view(rows, columns)
    found = parts(reader(tmp_path_factory.mktemp("parts"), {"w": whole}), "w", Weight(dim), ranks)
    assert torch.equal(torch.cat(found, dim=dim), whole)
    assert max(part.shape[dim] for part in found) == -(-whole.shape[dim] // ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_experts_saved_as_one_tensor_are_those_of_single_ones(tmp_path, ranks):
    gate_up, down = torch.randn(3, 16, 6), torch.randn(3, 6, 8)
    of = reader(tmp_path, {"e.experts.gate_up_proj": gate_up, "e.experts.down_proj": down})
    for expert in range(3):
        expected = {"gate": (gate_up[expert, :8], 0), "up": (gate_up[expert, 8:], 0), "down": (down[expert], 1)}
        for projection, (whole, dim) in expected.items():
            found = parts(of, f"e.experts.{expert}.{projection}_proj.weight", Weight(dim), ranks)
            assert torch.equal(torch.cat(found, dim=dim), whole)
            assert len({part.shape for part in found}) == 1


def test_quantized_weights_are_not_loaded_as_if_they_were_plain(tmp_path):
    checkpoint = tiny_models.save_checkpoint(tiny_models.qwen3_dense_config(), tmp_path, seed=1)
    tiny_models.quantize_fp8(checkpoint)
    with pytest.raises(CheckpointError, match="quantized"):
        load_weights([], checkpoint, shape=read_shape(checkpoint))


def test_a_tensor_or_a_file_that_is_absent_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"\*.safetensors"):
        _Reader(tmp_path)
    of = reader(tmp_path, {"w": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"e\.experts\.0\.up_proj\.weight"):
        of.read("e.experts.0.up_proj.weight", weight=Weight(0), split=None)
