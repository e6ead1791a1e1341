"""The names that a user of the library imports, and the cost of importing them."""

import importlib
import inspect
import subprocess
import sys

import pytest

import async_rl

PACKAGES = ("message_queue", "agent_loop", "async_rl")
IMPORTS = "import sys, {package}; heavy = {heavy} & set(sys.modules); assert not heavy, heavy"


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


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_imports_neither_torch_nor_ray(package):
    heavy = {"torch", "ray", "megatron", "vllm", "hydra", "pydantic", "transformers"}
    subprocess.run([sys.executable, "-c", IMPORTS.format(package=package, heavy=heavy)], check=True)


def test_a_run_without_a_program_imports_no_server():
    script = IMPORTS.format(package="async_rl.rollout.worker", heavy={"starlette", "uvicorn", "h11"})
    subprocess.run([sys.executable, "-c", script], check=True)
