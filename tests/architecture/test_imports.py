"""Which module may import what, and what pyproject.toml declares; `.importlinter` has the layers."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("message_queue", "agent_loop", "async_rl", "recipes")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
IMPORTED_ONLY_IN = {
    "omegaconf": {"async_rl/config/compose.py"},
    "hydra": {"async_rl/config/compose.py", "async_rl/run.py", "recipes/staleness/experiment.py"},
}
HEAVY = {"ray", "torch", "megatron", "vllm", "sglang", "transformers", "tensordict", "hydra", "omegaconf"}
SERVER_SIDE = ("async_rl/inference/sglang/plugin/", "async_rl/compat/sglang/")  # in the virtualenv of the SGLang server
EXTRAS = ("data", "mcp", "trackers", "vllm", "sglang")
DISTRIBUTIONS = {  # if the name differs from that of the import
    "annotated_types": "annotated-types",
    "docstring_parser": "docstring-parser",
    "hydra": "hydra-core",
    "math_verify": "math-verify",
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "pynvml": "nvidia-ml-py",
    "prometheus_client": "prometheus-client",
    "yaml": "pyyaml",
}


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


def forbidden(name: str, tree: ast.AST) -> set[str]:
    """Imports of the module `name` that belong in another one, or that its package does without."""
    found = imports(tree)
    misplaced = {each for each in found if name not in IMPORTED_ONLY_IN.get(each, {name})}
    if name.startswith("message_queue/"):
        return misplaced | (found - {"message_queue", "numpy", "msgspec", "xxhash"} - sys.stdlib_module_names)
    return misplaced | (found & HEAVY if name.startswith("agent_loop/") else set())


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_of_a_module_are_allowed_there(path):
    assert not forbidden(name_of(path), ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("async_rl/controller/launcher.py", "def f():\n    from omegaconf import DictConfig"),
        ("message_queue/queue.py", "from agent_loop.loop import Prompt"),
        ("agent_loop/chat.py", "from transformers import AutoTokenizer"),
    ],
)
def test_a_forbidden_import_is_noticed(name, source):
    assert forbidden(name, ast.parse(source))


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [r for name in EXTRAS for r in project["optional-dependencies"][name]]
    return {re.split(r"[\[<>=!~ ;]", requirement)[0].lower() for requirement in [*project["dependencies"], *extras]}


@pytest.mark.parametrize("path", [p for p in MODULES if not name_of(p).startswith(SERVER_SIDE)], ids=name_of)
def test_imports_are_declared_dependencies(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    foreign = imports(tree) - sys.stdlib_module_names - set(PACKAGES) - {"configs"}
    assert {DISTRIBUTIONS.get(name, name) for name in foreign} <= declared()
