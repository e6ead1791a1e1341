"""The guide to a new family is the way that one of the package was added."""

import shlex
import subprocess
import sys

import pytest

from async_rl.trainer.model import families
from async_rl.weights.model_info import CheckpointError
from tests.docs.pages import ROOT, titled
from tests.helpers import tiny_models

FAMILY = "glm4_moe_lite"
PAGE = (ROOT / "docs" / "guides" / "family.md").read_text()


def test_the_file_and_the_test_line_are_those_of_the_package():
    shown = titled(PAGE)
    assert shown[f"{FAMILY}.py"] == (ROOT / "async_rl/trainer/model/families" / f"{FAMILY}.py").read_text()
    (line,) = [line for line in shown["test_line.py"].splitlines() if FAMILY in line]
    assert line in (ROOT / "tests/helpers/tiny_models.py").read_text().splitlines()


def test_the_refusal_is_that_of_a_trainer_without_the_family(tmp_path, monkeypatch):
    monkeypatch.delitem(families.FAMILIES, FAMILY)
    tiny_models.save_checkpoint(tiny_models.tiny_config(FAMILY), tmp_path, seed=1)
    with pytest.raises(CheckpointError) as error:
        families.read_shape(tmp_path)
    said = str(error.value)
    assert said[said.index("the nearest") : said.index(" use another")] in PAGE


def test_the_commands_of_the_guide_find_tests_of_the_family():
    commands = [line.strip() for line in PAGE.splitlines() if line.startswith("    pytest ")]
    assert len(commands) == 4
    files = {word for command in commands for word in shlex.split(command) if word.startswith("tests/")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "--collect-only",
        "-q",
        "-k",
        FAMILY,
    ]
    said = subprocess.run([*command, *sorted(files)], cwd=ROOT, capture_output=True, text=True).stdout
    assert {file for file in files if f"{file}::" in said} == files, said
