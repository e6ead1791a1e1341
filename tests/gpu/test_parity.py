"""The parity table on CUDA, over NCCL: in float32 as on the CPU, in bfloat16 against one GPU alone.

A layout in bfloat16 is compared with one GPU in float32, as one GPU in bfloat16 is. The first must not be much further
off than the second: layouts change the order of sums, not their precision. Transformer Engine's layers, if it is
installed, have the same bound, from one GPU with the local layers.
"""

import importlib.util
from dataclasses import replace

import pytest
import torch

from tests.parallel.parity import TOLERANCE, run_cells
from tests.parallel.parity_cells import LAYOUTS, Cell

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.timeout(900),
]

BFLOAT16_RATIO = 2.0
BFLOAT16_ROUNDOFF = 2.0**-8  # the loss is one number, and may be close by luck on one GPU
CELLS = [
    Cell(family=family, layout=layout, replay=replay, recompute=recompute, packing=packing, dtype=dtype)
    for layout in LAYOUTS
    for family in ("qwen3_moe", "deepseek_v3")
    for replay, recompute, packing in (("R3", "full", "packed"), ("R2", "none", "padded"))
    # The live routers of R2 choose other experts in another precision; they are not compared here.
    for dtype in (("float32", "bfloat16") if replay == "R3" else ("float32",))
]
CELLS += [
    Cell(family=family, layout=layout, replay="R3", trees="mixed")
    for layout in ("single", "dp2", "tp2", "cp2", "ep2", "pp2-vpp2")
    for family in ("qwen3_moe", "deepseek_v3")
]
ENGINE = {"replay": "R3", "recompute": "full", "dtype": "bfloat16", "layers": "transformer_engine"}
ENGINE_CELLS = [
    Cell(family=family, layout=layout, packing=packing, **ENGINE)
    for layout in ("single", "tp2", "cp2", "ep2", "etp2", "pp2-vpp2", "tp2-cp2")
    for family in ("qwen3_moe", "deepseek_v3")
    for packing in ("packed", "padded")
]


def runnable(cell):
    installed = importlib.util.find_spec("transformer_engine") is not None
    return LAYOUTS[cell.layout].ranks <= torch.cuda.device_count() and (installed or cell.layers == "local")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    cells = [cell for cell in CELLS + ENGINE_CELLS if runnable(cell)]
    return {cell.name: found for cell, found in run_cells(cells, tmp_path_factory.mktemp("parity"))}


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: c.name)
def test_a_layout_is_within_rounding_of_one_gpu(cell, results):
    if not runnable(cell):
        pytest.skip(f"{cell.layout} needs {LAYOUTS[cell.layout].ranks} GPUs")
    found = results[cell.name]
    assert not found.error, found.error
    if cell.dtype == "float32":
        assert found.largest <= TOLERANCE, found
        return
    assert_as_close_as_one_gpu(found, results[cell.on_one_rank.name])


@pytest.mark.parametrize("cell", ENGINE_CELLS, ids=lambda c: c.name)
def test_transformer_engine_is_as_close_to_float32_as_the_local_layers(cell, results):
    if not runnable(cell):
        pytest.skip(f"{cell.layout} needs {LAYOUTS[cell.layout].ranks} GPUs, and transformer_engine")
    local = replace(cell.on_one_rank, layers="local", packing="packed")
    found = results[cell.name]
    assert not found.error, found.error
    assert_as_close_as_one_gpu(found, results[local.name])


def assert_as_close_as_one_gpu(found, alone):
    for name in ("loss", "logprobs", "gradients"):
        bound = BFLOAT16_RATIO * max(getattr(alone, name), BFLOAT16_ROUNDOFF)
        assert getattr(found, name) <= bound, (name, found, alone)
