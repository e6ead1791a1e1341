"""What the import hook makes of megatron's sources."""

import sys
from types import ModuleType

import pytest

from async_rl.compat import megatron as megatron_cpu
from async_rl.compat.megatron import rewrite_source


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.zeros(3, device='cuda')", 'torch.zeros(3, device="cpu")'),
        ("x = y.cuda()", "x = y.cpu()"),
        ("torch.cuda.current_device()", "torch.get_default_device()"),
        ("'torch.cuda.FloatTensor'", "'torch.FloatTensor'"),
        ("torch.cuda.manual_seed(3)", "torch.manual_seed(3)"),
        ("pin_memory=True", "pin_memory=False"),
        ("torch.cuda.is_available()", "torch.cuda.is_available()"),
    ],
)
def test_cuda_names_are_replaced(source, expected):
    assert rewrite_source(source) == expected


def test_line_numbers_stay():
    source = "import os\nimport torch\n\nside = torch.cuda.Stream()\ntorch.cuda.synchronize()\n"
    rewritten = rewrite_source(source)
    assert rewritten.count("\n") == source.count("\n")
    assert rewritten.splitlines()[3] == "side = _megatron_cpu.Stream()"
    space = {}
    exec(rewritten, space)
    assert isinstance(space["side"], megatron_cpu.Stream)


def test_importing_megatron_first_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match=r"import async_rl\.trainer first"):
        megatron_cpu.install()
