"""Which module may import what; `.importlinter` has the layers."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("message_queue", "agent_loop", "async_rl", "recipes")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
IMPORTED_ONLY_IN = {
    "omegaconf": {"async_rl/config.py"},
    "hydra": {"async_rl/config.py", "async_rl/run.py", "recipes/staleness/experiment.py"},
}
HEAVY = {"ray", "torch", "megatron", "vllm", "sglang", "transformers", "tensordict", "hydra", "omegaconf"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> set[str]:
    """Top-level packages that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def misplaced(name: str, tree: ast.AST) -> set[str]:
    """Imports of `name` that belong in another module."""
    return {p for p in imports(tree) if p in IMPORTED_ONLY_IN and name not in IMPORTED_ONLY_IN[p]}


def foreign(name: str, tree: ast.AST) -> set[str]:
    """Imports that the package of `name` does without."""
    if name.startswith("message_queue/"):
        return imports(tree) - {"message_queue", "numpy", "msgspec", "xxhash"} - sys.stdlib_module_names
    return imports(tree) & HEAVY if name.startswith("agent_loop/") else set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_of_a_module_are_allowed_there(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not misplaced(name_of(path), tree)
    assert not foreign(name_of(path), tree)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("async_rl/controller/launcher.py", "def f():\n    from omegaconf import DictConfig"),
        ("async_rl/controller/launcher.py", "import hydra.utils"),
        ("message_queue/client.py", "import ray"),
        ("message_queue/queue.py", "from agent_loop.loop import Prompt"),
        ("agent_loop/chat.py", "from transformers import AutoTokenizer"),
    ],
)
def test_a_forbidden_import_is_noticed(name, source):
    assert misplaced(name, ast.parse(source)) | foreign(name, ast.parse(source))
