"""The wheel runs from any directory and installs no module with a common name."""

import subprocess
import sys

import pytest

from tests.helpers.wheel import environment_of, install_wheel

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
    return install_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_three_packages_and_no_other_module(installed):
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names == {"message_queue", "agent_loop", "async_rl"}
    for page in ("viewer.html", "report.html", "common.html"):
        assert (installed / "async_rl" / "metrics" / page).is_file()


def test_an_installed_run_finds_its_configs_and_recipes(installed, tmp_path):
    (tmp_path / "recipes").mkdir()  # a folder of the user
    (tmp_path / "recipes" / "__init__.py").touch()
    command = [sys.executable, "-c", START]
    found = subprocess.check_output(command, cwd=tmp_path, env=environment_of(installed), text=True)
    config = str(installed / "async_rl" / "config" / "__init__.py")
    modules = ["async_rl.recipes.calculator.task", "async_rl.recipes.math.sample_task"]
    assert found.split() == [config, modules[0], config, modules[1]]
