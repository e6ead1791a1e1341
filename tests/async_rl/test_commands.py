"""The command `async-rl`: its help, names, exit codes and Ctrl-C."""

import os
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest

from async_rl.__main__ import COMMANDS, main
from async_rl.config import ConfigError, load_config
from async_rl.files.command import EXIT_INTERRUPTED, prog, words
from async_rl.run import _parse, resume_command
from tests.architecture.test_imports import ROOT

AS_PACKAGE = [sys.executable, "-m", "async_rl"]
FORMS = {  # sys.argv[0] -> words of `run`
    "/venv/bin/async-rl": ["/venv/bin/async-rl", "run"],
    "/site/async_rl/__main__.py": [sys.executable, "-m", "async_rl", "run"],
    "/site/async_rl/run.py": [sys.executable, "-m", "async_rl.run"],
    "/site/async_rl/explain/__main__.py": [sys.executable, "-m", "async_rl.run"],
    "/home/script.py": [sys.executable, "-m", "async_rl.run"],
}
INTERRUPT = """
import os, signal, sys
from async_rl.files.command import end_process

class Interrupt:
    "Ctrl-C when a module is imported, by code that catches everything."
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
            raise ImportError(name)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["async-rl", *{arguments!r}]
end_process("async_rl.__main__")
"""
ENDS = """
import atexit, ctypes, os, signal, sys, types
from async_rl.files.command import end_process

class Leaked:
    def __del__(self):
        print("freed")

report = ctypes.PYFUNCTYPE(None)(lambda: print("leaked", flush=True))  # as nanobind and pybind11 do
ctypes.pythonapi.Py_AtExit(report)

def returns(argv):
    atexit.register(print, "closed")
    sys.modules["kept"] = Leaked()
    print("ran", end=" ")
    return 3

def is_interrupted(argv):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        print("closed")

sys.modules["mine"] = types.SimpleNamespace(main={main})
end_process("mine")
"""


def python(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)


def test_help_has_a_line_for_each_command_and_imports_nothing_heavy():
    found = python(
        "import sys; from async_rl.__main__ import main; main(['--help'])\n"
        "print({'numpy', 'yaml', 'hydra', 'argparse', 'torch', 'ray', 'asyncio'} & set(sys.modules))"
    )
    shown = found.stdout.splitlines()
    assert shown[-1] == "set()", found
    assert [name for name in COMMANDS if sum(line.split()[:1] == [name] for line in shown) != 1] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_is_that_of_its_module(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/venv/bin/async-rl", name])
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: async-rl {name} ")


@pytest.mark.parametrize(("word", "nearest"), [("evalute", "evaluate"), ("seed=1", "run"), ("--check", "run")])
def test_an_unknown_command_names_the_nearest_one(word, nearest, capsys):
    assert main([word]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert repr(word) in line and f" {nearest}?" in line and all(name in line for name in COMMANDS)


def test_the_console_script_is_the_command_and_without_arguments_shows_its_help(capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["async-rl"].partition(":")
    assert callable(getattr(import_module(module), name))
    assert main([]) == 0 and "commands:" in capsys.readouterr().out


@pytest.mark.parametrize("called", FORMS)
def test_messages_name_the_command_as_it_was_called(called, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [called])
    assert words("run") == FORMS[called]
    assert resume_command(_parse(["seed=4"]), output_dir=tmp_path).startswith(" ".join(FORMS[called]) + " --")
    assert prog("run") == " ".join(FORMS[called]).replace(sys.executable, "python").replace("/venv/bin/", "")
    with pytest.raises(ConfigError, match=prog("run")):
        load_config(["seed=0,1"])


def test_a_wrong_argument_is_refused_with_the_usage():
    found = subprocess.run([*AS_PACKAGE, "plan", "--steps"], capture_output=True, text=True)
    assert found.returncode == 2 and "usage: python -m async_rl plan" in found.stderr


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("async_rl.run", ["run"]),
        ("pydantic", ["check"]),
        ("async_rl.controller.launcher", ["run", "output_dir=made/run"]),
        ("numpy", ["report", "run"]),
        ("torch", ["simulate"]),
    ],
)
def test_an_interrupt_during_an_import_gives_one_line_and_leaves_nothing(module, arguments, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = python(INTERRUPT.format(module=module, arguments=arguments), cwd=tmp_path, env=environment)
    assert (found.returncode, found.stdout + found.stderr) == (EXIT_INTERRUPTED, "stopped\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("main", "expected"),
    [("returns", (3, "ran closed\n", "")), ("is_interrupted", (EXIT_INTERRUPTED, "closed\n", "stopped\n"))],
)
def test_a_process_unwinds_and_ends_with_its_code_and_frees_nothing(main, expected):
    found = python(ENDS.format(main=main))
    assert (found.returncode, found.stdout, found.stderr) == expected


def test_a_defect_is_shown_with_its_place():
    found = python("from async_rl.files.command import end_process; end_process('json')")  # it has no main
    assert found.returncode == 1 and "AttributeError" in found.stderr
