"""The command line: exit codes, and how a failure reads."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from async_rl.config import CONFIGS, RECIPES, build_config, load_config, recipe_overrides
from async_rl.run import EXIT_REFUSED, _hydra_value, _parse, causes, log_ends, main, resume_command
from message_queue.journal import FORMAT, EventJournal, JournalConfig
from message_queue.state import StoredState


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["wish=1"],
        ["total_train_steps=few"],
        ["task.prompt_file=/nowhere/prompts.jsonl"],
        ["task.options.min_operand=-5"],
        ["task.options.max_operand=hello"],
        ["+task.options.wish=1"],
        ["task.factory=nowhere:Task"],
        ["model=hugging_face", "model.checkpoint=/nowhere"],
    ],
    ids=" ".join,
)
def test_bad_input_of_a_run_exits_with_2_and_one_error(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([f"output_dir={tmp_path / 'run'}", *arguments]) == EXIT_REFUSED
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and len(error.splitlines()) <= 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"messages": [{"role": "user", "content": "1+1="}], "target": {"answer": 2}}', "target.answer"),
        ('{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}', "answer"),
    ],
)
def test_a_run_refuses_a_prompt_without_its_target(capsys, tmp_path, line, key):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"messages": [{{"role": "user", "content": "1="}}], "target": {{"answer": "1"}}}}\n{line}\n')
    assert main([f"output_dir={tmp_path / 'run'}", f"task.prompt_file={path}"]) == EXIT_REFUSED
    error = capsys.readouterr().err
    assert "task.prompt_file" in error and "line 2" in error and key in error
    assert not (tmp_path / "run").exists()


def test_a_run_refuses_a_directory_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main([f"output_dir={tmp_path / 'file' / 'run'}"]) == EXIT_REFUSED
    assert "output_dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "format_number", "checksum", "named"),
    [
        ("other seed 0", FORMAT, "checksum", ["'other seed 0'"]),
        ("calculator seed 0", 99, "checksum", ["format 99"]),
        ("calculator seed 0", FORMAT, "checksum + 1", ["events.sqlite", "remove the directory"]),
    ],
    ids=["run", "format", "damage"],
)
def test_a_run_refuses_a_journal_that_it_cannot_continue(
    capsys, tmp_path, monkeypatch, run, format_number, checksum, named
):
    monkeypatch.setattr("message_queue.journal.FORMAT", format_number)
    journal = EventJournal(tmp_path / "journal", run=run, settings={}, config=JournalConfig())
    journal._write([StoredState()])
    journal._connection.execute(f"UPDATE state SET checksum = {checksum}")
    journal._connection.commit()
    journal.release()
    monkeypatch.undo()
    assert main([f"output_dir={tmp_path}"]) == EXIT_REFUSED
    error = " ".join(capsys.readouterr().err.split())
    assert all(name in error for name in named)


@pytest.mark.parametrize(
    "given",
    [
        ["total_train_steps=200", "loss=ppo_clip", "optimizer.lr=1e-4", "resume=never"],
        ["--recipe", "staleness", "+task.options.steps=[2, 3]", "task.prompt_file='/tmp/a b,c.jsonl'"],
        ["--config-name", "other", "--config-dir", "OTHER", "name=try", "output_dir=outputs/${name}"],
    ],
)
@pytest.mark.parametrize("folder", ["outputs/x", "of a person/it's, {x}: $y=1", r"back\slash", "12"])
def test_the_resume_command_gives_the_config_of_the_run(given, folder, tmp_path):
    other = shutil.copytree(CONFIGS, tmp_path / "other configs")
    (other / "other.yaml").write_text((CONFIGS / "run.yaml").read_text() + "\nseed: 7\n")
    given = [str(other) if word == "OTHER" else word for word in given]
    if not any(word.startswith("output_dir=") for word in given):
        given = [*given, "output_dir=" + _hydra_value(str(tmp_path / folder))]
    arguments = _parse(given)
    config = config_of(arguments)
    again = shlex.split(resume_command(arguments, output_dir=config.output_dir))
    assert again[:3] == [sys.executable, "-m", "async_rl.run"]
    for own in ("output_dir=", "resume="):
        assert sum(word.startswith(own) for word in again) == 1
    assert config_of(_parse(again[3:])) == replace(config, resume="auto")


@pytest.mark.parametrize(
    "text", ["12", "null", "a", "a b", "it's", r"\\'", "$HOME/${x}", "[a, b]", "{a: b}", "", "/a\\"]
)
def test_a_quoted_value_of_an_override_is_the_text_itself(text):
    assert load_config([f"name={_hydra_value(text)}"]).name == text


def config_of(arguments):
    recipe = recipe_overrides(RECIPES / arguments.recipe / "recipe.yaml") if arguments.recipe else []
    options = {"config_name": arguments.config_name, "config_dir": arguments.config_dir or CONFIGS}
    return load_config([*recipe, *arguments.overrides], **options)


REFUSED = """
import sys

from async_rl.run import main

print(main(["rollout.wokers=2"]), sorted({"torch", "megatron", "vllm", "ray", "transformers"} & sys.modules.keys()))
"""


def test_a_misspelt_override_is_refused_without_torch():
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True)
    assert done.stdout == f"{EXIT_REFUSED} []\n"
    assert "rollout.wokers" in done.stderr and "rollout.workers" in done.stderr


def test_show_prints_all_values_of_a_run_without_starting_it(capsys, tmp_path):
    assert main(["--show", f"output_dir={tmp_path / 'run'}", "rollout.workers=2"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert build_config(values) == load_config([f"output_dir={tmp_path / 'run'}", "rollout.workers=2"])
    assert not (tmp_path / "run").exists()


def test_causes_and_log_ends_are_found_in_groups_each_once():
    lost = OSError("replica-0 died")
    lost.add_note("the end of replica-0.log:\n    out of memory")
    noted = ValueError("rank 0 failed")
    noted.add_note("the end of trainer-0.log:")
    rollouts = _chained(RuntimeError("stage rollout failed"), ExceptionGroup("rollouts", [KeyError("b")]))
    error = ExceptionGroup("all", [_chained(RuntimeError("stage publish failed"), lost), lost, noted, rollouts])
    assert log_ends(error) == ["the end of replica-0.log:\n    out of memory", "the end of trainer-0.log:"]
    assert list(causes(error)) == [
        "stage publish failed: OSError: replica-0 died",
        "replica-0 died",
        "rank 0 failed",
        "stage rollout failed: 'b'",
    ]


def _chained(error, cause):
    error.__cause__ = cause
    return error
