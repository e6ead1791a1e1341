"""Cells of the parity table that run with every change (`make parity` runs them all), and the defects that it finds.

The cells are mixes of layouts on four ranks, one or more for each replay mode, recomputation, packing and family.
"""

import pytest
import torch

from tests.helpers.lanes import chosen_cases
from tests.parallel import parity_table
from tests.parallel.broken_replay import FAULTS, ROUNDED
from tests.parallel.parity import TOLERANCE, Difference, compare, run_cells
from tests.parallel.parity_cells import FAMILIES, Cell
from tests.parallel.support import MARKS

pytestmark = MARKS


def cell(family, layout, replay, recompute, packing, fault="", **changes):
    return Cell(
        family=family, layout=layout, replay=replay, recompute=recompute, packing=packing, fault=fault, **changes
    )


SOUND = [
    cell("qwen3_moe", "tp2-pp2-vpp2", "R2", "full", "padded"),
    cell("deepseek_v3", "tp2-pp2-vpp2", "R3", "full", "packed"),
    cell("qwen3_moe", "tp2-dp2-ep2-etp1", "R3", "selective", "packed"),
    cell("deepseek_v3", "tp2-dp2-ep2-etp1", "R2", "none", "padded"),
    cell("qwen3_moe", "tp4", "R3", "selective", "packed"),
    cell("qwen3_moe", "cp2-pp2", "R3", "full", "packed"),
    cell("qwen3_moe", "cp2-ep2-dp2", "none", "full", "padded"),
    cell("deepseek_v3", "tp2-cp2", "R3", "selective", "padded"),
    cell("qwen3_moe", "ep2-etp2", "R3", "full", "packed"),
    cell("qwen3_moe", "ep2-dp2-distopt", "R2", "full", "packed"),
    cell("deepseek_v3", "pp2-vpp2-ep2", "R3", "none", "padded"),
    cell("qwen3_moe", "pp4", "R3", "full", "packed"),
    cell("gpt_oss", "pp2-vpp2-ep2", "none", "none", "packed"),
    cell("qwen3_next", "tp2-pp2", "R3", "selective", "padded"),
    cell("qwen3_next", "cp2-ep2-dp2", "R2", "full", "padded"),
    cell("qwen3_5", "tp2-cp2", "R2", "selective", "packed"),
    cell("gpt_oss", "tp2-cp2", "R3", "none", "padded"),
    cell("gpt_oss", "ep2-etp2", "R2", "full", "packed"),
    cell("gpt_oss", "tp4", "R3", "selective", "packed"),
    cell("gpt_oss", "tp2-dp2-ep2-etp1", "R3", "full", "packed"),
    cell("qwen3_moe", "tp2-pp2", "R3", "full", "packed", ROUNDED),
    cell("deepseek_v3", "tp2-pp2", "R2", "full", "packed", ROUNDED),
    cell("deepseek_v3", "tp2-cp2", "R3", "selective", "packed", layers="fused"),
    cell("qwen3_moe", "ep2-etp2", "R2", "full", "padded", layers="fused"),
    cell("qwen3_moe", "tp4", "R2", "full", "padded", layers="fused"),
    cell("qwen3_moe", "tp2-dp2-ep2-etp1", "R3", "full", "packed", layers="fused"),
    cell("qwen3_moe", "tp2-pp2-vpp2", "R3", "full", "packed", support=True),
    cell("deepseek_v3", "tp2-cp2", "R2", "selective", "padded", support=True),
    cell("qwen3_moe", "cp2-ep2-dp2", "none", "none", "packed", support=True),
]
TREES = [
    cell("qwen3_moe", "single", "R3", "none", "packed", trees="group"),
    cell("qwen3_moe", "dp2", "R3", "none", "packed", trees="forks", support=True),
    cell("deepseek_v3", "tp2", "R3", "selective", "packed", trees="mixed"),
    cell("qwen3_moe", "cp2", "R3", "none", "packed", trees="mixed"),
    cell("deepseek_v3", "cp2-ep2", "R2", "full", "packed", trees="forks"),
    cell("qwen3_moe", "pp2-vpp2", "R3", "full", "packed", trees="mixed", support=True),
    cell("qwen3_moe", "tp2-ep2-etp1", "R2", "none", "packed", trees="compaction"),
    cell("qwen3_moe", "tp2-cp2", "R3", "selective", "packed", trees="group"),
    cell("qwen3_moe", "tp2-dp2-ep2-etp1", "R3", "full", "packed", trees="mixed"),
    cell("deepseek_v3", "cp2-pp2", "none", "none", "packed", trees="mixed"),
    cell("qwen3_moe", "ep2-etp2", "R3", "none", "packed", trees="forks", layers="fused"),
    cell("qwen3_next", "single", "R3", "none", "packed", trees="mixed"),
    cell("qwen3_next", "cp2", "R3", "selective", "packed", trees="mixed"),
    cell("qwen3_next", "tp2-ep2-etp1", "R3", "full", "packed", trees="forks"),
    cell("qwen3_5", "tp2-pp2", "R3", "none", "packed", trees="group"),
    cell("gpt_oss", "cp2", "R3", "selective", "packed", trees="mixed"),
    cell("gpt_oss", "tp2-pp2-vpp2", "R3", "full", "packed", trees="mixed"),
]
CRITICS = [
    cell("qwen3_moe", "dp2-distopt", "R3", "none", "packed", critic="own"),
    cell("qwen3_moe", "tp2", "R3", "none", "packed", critic="own"),
    cell("qwen3_moe", "tp2", "R2", "full", "packed", critic="shared"),
    cell("deepseek_v3", "tp2-etp1", "R3", "none", "packed", critic="shared"),
    cell("qwen3_moe", "cp2", "R3", "none", "packed", critic="own", trees="mixed"),
    cell("deepseek_v3", "pp2", "R3", "none", "padded", critic="own"),
    cell("qwen3_moe", "pp2-vpp2", "R3", "none", "packed", critic="shared", trees="forks"),
    cell("qwen3_moe", "ep2", "R3", "selective", "packed", critic="own"),
    cell("qwen3_moe", "etp2", "none", "none", "packed", critic="own"),
    cell("qwen3_moe", "tp2-pp2-vpp2", "R3", "full", "packed", critic="own"),
    cell("qwen3_moe", "tp2-cp2", "R3", "none", "packed", critic="shared", trees="group"),
    cell("deepseek_v3", "tp2-dp2-ep2-etp1", "R3", "none", "packed", critic="own"),
    cell("qwen3_moe", "tp2-dp2-distopt", "R3", "none", "packed", critic="shared"),
    cell("gpt_oss", "pp2-vpp2-ep2", "none", "none", "packed", critic="own"),
    cell("qwen3_5", "tp2-dp2-ep2-etp1", "R3", "none", "packed", critic="own", trees="mixed"),
]
SOUND += [*TREES, *CRITICS]
BROKEN = [cell("qwen3_moe", "tp2-pp2", "R3", "full", "packed", fault) for fault in FAULTS if fault != ROUNDED]
BROKEN += [cell("qwen3_moe", "ep2-etp2", "R3", "none", "packed", "drop-layer", layers="fused")]
BROKEN += [cell("deepseek_v3", "tp2-pp2", "R2", "full", "packed", fault) for fault in ("drop-layer", "shift-token")]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Result of each cell that is tested."""
    cells = chosen_cases(request, "cell")
    return {cell.name: found for cell, found in run_cells(cells, tmp_path_factory.mktemp("parity"))}


@pytest.mark.drawn(6)
@pytest.mark.parametrize("cell", SOUND, ids=lambda c: c.name)
def test_a_layout_is_within_rounding_of_one_rank(cell, results):
    found = results[cell.name]
    assert not found.error, found.error
    assert found.largest <= TOLERANCE, found


@pytest.mark.drawn(2)
@pytest.mark.parametrize("cell", BROKEN, ids=lambda c: c.name)
def test_a_broken_replay_is_seen(cell, results):
    found = results[cell.name]
    assert not found.error, found.error
    assert found.gradients > 1e3 * TOLERANCE, found


def test_the_gradient_of_a_cell_is_that_of_its_worst_tensor():
    one, zero = torch.ones(2), torch.zeros(2)
    theirs = {"loss": 2.0, "logprobs": one, "gradients": {"a": one, "b": one, "c": zero}}
    found = compare({"loss": 2.2, "logprobs": one, "gradients": {"a": 1.1 * one, "b": 1.5 * one, "c": zero}}, theirs)
    assert (found.loss, found.logprobs, found.gradients, found.worst) == (pytest.approx(0.1), 0, 0.5, "b")
    for changed in (
        {"a": one, "b": one},
        {"a": float("nan") * one, "b": one, "c": zero},
        {"a": one, "b": one, "c": one},
    ):
        assert compare({**theirs, "gradients": changed}, theirs).largest == float("inf")


OFF = Difference(loss=0, logprobs=0, gradients=2 * TOLERANCE, worst="w")


@pytest.mark.parametrize("bad", [OFF, Difference(error="died")])
def test_the_command_names_cells_that_are_off_and_repeats_them_alone(bad, monkeypatch, tmp_path, capsys):
    name, run, found = cell("qwen3_moe", "tp2", "R3", "full", "packed").name, [], {}
    good = Difference(loss=0, logprobs=0, gradients=TOLERANCE / 2, worst="w")

    def run_cells(cells, _folder):
        run.append([cell.name for cell in cells])
        return ((cell, found.get(cell.name, good)) for cell in cells)

    monkeypatch.setattr(parity_table, "run_cells", run_cells)
    arguments = ["--layout", "tp2", "--json", str(tmp_path / "cells.jsonl"), "--markdown", str(tmp_path / "table.md")]
    found[name] = bad
    assert parity_table.main([*arguments, "--replay", "R3"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed if line.startswith("OFF")] == [f"OFF {name}"]
    del found[name]
    assert parity_table.main(arguments) == 0
    assert len(run[0]) == 12 and len(run[1]) == 36 - 12 + 1 and name in run[1]
    assert "36 cells" in capsys.readouterr().out
    assert (tmp_path / "table.md").read_text().count("| tp2 |") == len(FAMILIES)
