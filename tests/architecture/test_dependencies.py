"""Every package that the product imports is declared in pyproject.toml."""

import ast
import re
import sys
import tomllib

import pytest

from tests.architecture.test_imports import MODULES, PACKAGES, ROOT, imports, name_of

SERVER_SIDE = (
    "async_rl/inference/sglang/plugin/",
    "async_rl/compat/sglang/",
)  # run in the virtualenv of the SGLang server
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


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        r for name in ("data", "mcp", "trackers", "vllm", "sglang") for r in project["optional-dependencies"][name]
    ]
    return {re.split(r"[\[<>=!~ ;]", requirement)[0].lower() for requirement in [*project["dependencies"], *extras]}


def undeclared(tree: ast.AST) -> set[str]:
    """Distributions that a module imports and pyproject.toml does not name."""
    foreign = imports(tree) - sys.stdlib_module_names - set(PACKAGES) - {"configs"}
    return {DISTRIBUTIONS.get(name, name) for name in foreign} - declared()


@pytest.mark.parametrize("path", [p for p in MODULES if not name_of(p).startswith(SERVER_SIDE)], ids=name_of)
def test_imports_are_declared_dependencies(path):
    assert not undeclared(ast.parse(path.read_text(encoding="utf-8")))


def test_an_undeclared_import_is_noticed():
    assert undeclared(ast.parse("def f():\n    import scipy.stats\n    import yaml, json, recipes")) == {"scipy"}
