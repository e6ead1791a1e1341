"""The names that a user of the library imports, and the cost of importing them."""

import importlib
import inspect
import subprocess
import sys

import pytest

import async_rl

PACKAGES = ("message_queue", "agent_loop", "async_rl")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_resolves_to_something_of_the_package(package):
    module = importlib.import_module(package)
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        exported = getattr(module, name)
        assert not inspect.ismodule(exported)
        assert getattr(exported, "__module__", package).partition(".")[0] in (*PACKAGES, "builtins")


def test_the_lazy_names_of_async_rl_are_those_it_exports():
    assert sorted(name for names in async_rl._MODULES.values() for name in names) == async_rl.__all__


def test_a_name_that_async_rl_does_not_export_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Trainer"):
        _ = async_rl.Trainer


HEAVY = {"torch", "ray", "megatron", "vllm", "hydra", "pydantic", "transformers"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        *((package, HEAVY) for package in PACKAGES),
        ("async_rl.plan.simulation", {"torch", "ray", "vllm", "hydra"}),
        ("async_rl.rollout.worker", {"starlette", "uvicorn", "h11"}),  # of a run without a program
    ],
)
def test_a_module_imports_nothing_heavy_that_it_does_not_use(module, heavy):
    script = f"import sys, {module}; heavy = {heavy} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", script], check=True)
