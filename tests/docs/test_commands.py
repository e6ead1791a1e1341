"""Every shell command of the documentation is checked as far as it goes without starting a process.

A run is checked with `--check`, on the files that the pages show and on checkpoints that are made here. Other commands
have their arguments parsed, `make` is asked what it would call, and the rest is in a list with the test that runs it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_rl.config import load_config
from async_rl.controller.evaluation import Evaluation
from tests.docs.pages import PAGES, RECIPES, ROOT, commands, module_of, titled
from tests.helpers import full_size, tiny_models, tokenizers_of_families

COMMANDS = sorted({command for page in [*PAGES, *RECIPES] for command in commands(page.read_text())})
LISTED = {  # first words of a command that only its own program can check -> test that runs it, or a part
    "ray start": "tests/e2e/clusters.py",
    "srun ray symmetric-run": "tests/docs/test_cluster_guide.py",
    "docker build": "tests/docs/test_cluster_guide.py",
    "kubectl apply -f run.yaml": "tests/docs/test_cluster_guide.py",
    "python -m async_rl.run loss=capped_proximal": "tests/docs/test_code_blocks.py",  # after the steps of the guide
    "git clone": "tests/docs/test_code_blocks.py",
    "python3.11 -m venv": "tests/e2e/test_own_task.py",
    "hf download": "tests/async_rl/weights/test_model_settings.py",
}
EXAMPLE_FILES = {  # files that a page names and does not show
    "rows.jsonl": '{"prompt": [{"role": "user", "content": "?"}], "reward_spec": {"ground_truth": {"target": ["7"]}}}\n',  # noqa: E501
    "gsm8k/train.jsonl": '{"question": "2 + 3?", "answer": "#### 5"}\n',
    "gsm8k/test.jsonl": '{"question": "3 + 3?", "answer": "#### 6"}\n',
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


class Parsed(BaseException):
    """The arguments of a command are parsed; nothing after that runs."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory with the files of all pages, checkpoints under the names of the pages, and `shared`."""
    folder = tmp_path_factory.mktemp("docs")
    for page in PAGES:
        for title, text in titled(page.read_text()).items():
            (folder / title).write_text(text)
    for name, text in EXAMPLE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    tokenizer = tokenizers_of_families.build("qwen")
    config = tiny_models.qwen3_moe_config(vocab_size=len(tokenizer), mlp_only_layers=[], max_position_embeddings=4096)
    tokenizer.save_pretrained(tiny_models.save_checkpoint(config, folder / "PATH", seed=0))
    for name in ("Qwen", "shared", "build/first_model"):
        (folder / name).mkdir(parents=True)
    (folder / "build" / "first_model" / "model").symlink_to(folder / "PATH")
    for model in full_size.MODELS:
        (folder / "shared" / model).symlink_to(full_size.save_empty(model, folder / "Qwen" / model))
    (folder / "shared" / "model").symlink_to(folder / "Qwen" / "Qwen3-30B-A3B")
    (folder / "shared" / "products.py").symlink_to(folder / "products.py")
    return folder


@pytest.fixture
def check(place, monkeypatch, capsys):
    """Checks the words of a command; fails with what it said."""
    monkeypatch.chdir(place)
    for name in ("RUN_KEY", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setattr(Evaluation, "run", no_rollouts)
    checks = {"async_rl.run": check_run, "async_rl.evaluate": evaluate}

    def checked(words: Sequence[str]) -> None:
        listed = next((name for name in LISTED if shlex.join(words).startswith(name)), None)
        match [word for word in words if word != "..."]:
            case _ if listed is not None:
                assert (ROOT / LISTED[listed]).is_file()
            case ["async-rl", "--help"] | ["async-rl", "COMMAND"]:
                assert importlib.import_module("async_rl.__main__").main(["--help"]) == 0
            case ["async-rl", *arguments]:
                checked(["python", "-m", "async_rl", *arguments])
            case ["python", "-m", "async_rl", name, *arguments]:
                module = importlib.import_module("async_rl.__main__").COMMANDS[name][0].removesuffix(".__main__")
                checked(["python", "-m", module, *(["--check"] if name == "check" else []), *arguments])
            case ["python", "-m", module] if module != "async_rl.run":  # named, not called
                assert importlib.util.find_spec(module) is not None, module
            case ["python", "-m", _, *_, "--help"]:
                with pytest.raises(SystemExit, match="0"):
                    importlib.import_module(words[2]).main(words[3:])
            case ["python", "-m", module, *arguments]:
                code = checks.get(module, lambda given: parse(module, given))([located(word) for word in arguments])
                said = capsys.readouterr().err
                if "cannot be imported" in said and "pip install" in said:
                    pytest.skip(said)  # a package of the recipe
                assert code == 0, said
            case ["python", script, *arguments] if script.startswith("benchmarks/"):
                parse(script.removesuffix(".py").replace("/", "."), arguments)
            case ["make", *arguments]:
                check_make(arguments, checked)
            case ["pip" | ".venv/bin/pip", "install" | "uninstall", *arguments]:
                check_pip(arguments)
            case ["sbatch", "run.sbatch", *arguments]:
                checked(["python", "-m", "async_rl.run", *arguments])
            case ["docker", "run", *arguments]:
                checked(arguments[arguments.index("python") :])
            case _:
                raise AssertionError(f"{shlex.join(words)} is no command that this file can check; list it")

    def located(word: str) -> str:
        """A word with the paths of the pages replaced by those of the test."""
        word = re.sub(r"(?<![\w/])/shared\b", f"{place}/shared", word.replace("s3://bucket", f"file://{place}"))
        return "--task=./" + word.removeprefix("--task=") if word.startswith("--task=") else word

    return checked


async def no_rollouts(_evaluation, _out):
    return SimpleNamespace(failed=0, num_rollouts=1)


def check_run(arguments: Sequence[str]) -> int:
    """`--check`; of a run that follows the schedule of another one, only the config."""
    from async_rl.run import main

    if any(word.startswith("schedule=") for word in arguments):
        load_config(arguments)
        return 0
    return main(arguments if "--show" in arguments else ["--check", *arguments])


def evaluate(arguments: Sequence[str]) -> int:
    """All checks of an evaluation; of a run directory, absent from the pages, only the arguments."""
    from async_rl.evaluate import main

    return parse("async_rl.evaluate", arguments) if arguments[0].startswith("outputs/") else main(arguments)


def parse(module: str, arguments: Sequence[str]) -> int:
    """Import the module and let it parse the arguments; one without a parser has no arguments."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    if spec.submodule_search_locations is not None:
        return parse(f"{module}.__main__", arguments)
    source = Path(spec.origin).read_text()
    if "ArgumentParser" not in source:
        assert not arguments, module
        return 0
    methods = ("parse_known_args",) if "parse_known_args" in source else ("parse_args", "parse_intermixed_args")
    with pytest.MonkeyPatch.context() as patch:
        for name in methods:
            patch.setattr(argparse.ArgumentParser, name, parsed(getattr(argparse.ArgumentParser, name)))
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(Parsed):
            importlib.import_module(module).main()
    return 0


def parsed(method):
    def ended(self, *arguments):
        method(self, *arguments)
        raise Parsed

    return ended


def check_make(arguments: Sequence[str], checked) -> None:
    """The targets exist, and what they call is checked."""
    ready = [
        word for name in ("", "-sglang", "-docs", "-agents", "-verifiers") for word in ("-o", f".venv{name}/.ready")
    ]
    command = ["make", "--dry-run", "--no-print-directory", *ready, *arguments]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    if any(word.startswith("ARGS=") for word in arguments):
        calls = [line for line in said.stdout.splitlines() if re.match(r"(\w+=\S+ )*\S*/python -m async_rl", line)]
        for line in calls:
            checked(["python", *shlex.split(line[line.index("/python ") + len("/python ") :])])


def check_pip(arguments: Sequence[str]) -> None:
    """The extras exist."""
    for word in arguments:
        for extra in re.findall(r"async-rl\[([\w,-]+)\]", word):
            assert set(extra.split(",")) <= set(EXTRAS), word


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documentation_is_accepted(command, check):
    check(shlex.split(command))


def test_the_entrypoint_of_the_ray_job_is_accepted(check):
    found = re.search(r"entrypoint: >-\n((?: {4}.*\n)+)", module_of("docs/guides/cluster.md", "run.yaml"))
    check(shlex.split(found[1]))


@pytest.mark.parametrize(
    "command",
    [
        "python -m async_rl.run --task products.py model.checkpoint=PATH rollout.workers=0",
        "python -m async_rl.run --task nothing.py model.checkpoint=PATH",
        "python -m async_rl.run scale=dense_8b_8 model.checkpoint=PATH --task products.py",
        "python -m async_rl.evaluate PATH",
        "python -m async_rl.nothing",
        "python benchmarks/publishes.py --nothing",
        "make run ARGS=seeds=1",
        "make nothing",
        "pip install async-rl[nothing]",
        "nothing run",
    ],
)
def test_a_command_that_is_refused_is_noticed(command, check):
    with pytest.raises((AssertionError, SystemExit)):
        check(shlex.split(command))
