"""The wheel runs from any directory and installs no module with a common name."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.architecture.test_imports import ROOT

CONTENT = ("message_queue", "agent_loop", "async_rl", "configs", "recipes", "pyproject.toml", "setup.py", "README.md")
START = """
import sys

sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]  # no checkout
import async_rl.config
from async_rl.config import RECIPES, load_config, recipe_overrides
from async_rl.rollout.task import build_task

for recipe in ("calculator", "math"):
    config = load_config(recipe_overrides(RECIPES / recipe / "recipe.yaml"))
    task = build_task(config.task, seed=0)
    task.train_prompt(0)
    print(async_rl.config.__file__, type(task).__module__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Folder with the content of the wheel."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for name in (*CONTENT, "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), "."]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_the_wheel_has_three_packages_and_no_other_module(installed):
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names == {"message_queue", "agent_loop", "async_rl"}
    for page in ("viewer.html", "report.html"):
        assert (installed / "async_rl" / "metrics" / page).is_file()


def test_an_installed_run_finds_its_configs_and_recipes(installed, tmp_path):
    (tmp_path / "recipes").mkdir()  # a folder of the user
    (tmp_path / "recipes" / "__init__.py").touch()
    found = subprocess.run(
        [sys.executable, "-c", START],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    config = str(installed / "async_rl" / "config.py")
    modules = [f"async_rl.recipes.{recipe}.task" for recipe in ("calculator", "math")]
    assert found.stdout.split() == [config, modules[0], config, modules[1]]
