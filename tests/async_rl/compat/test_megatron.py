"""Changes of the import hook to the sources of megatron."""

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
def test_rewrite_source_replaces_cuda_names(source, expected):
    assert rewrite_source(source) == expected


def test_rewrite_source_keeps_line_numbers():
    source = "import os\nimport torch\n\nside = torch.cuda.Stream()\ntorch.cuda.synchronize()\n"
    rewritten = rewrite_source(source)
    assert rewritten.count("\n") == source.count("\n")
    assert rewritten.splitlines()[3] == "side = _megatron_cpu.Stream()"
    space = {}
    exec(rewritten, space)
    assert isinstance(space["side"], megatron_cpu.Stream)


def test_install_refuses_megatron_imported_first(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match=r"async_rl\.trainer"):
        megatron_cpu.install()
