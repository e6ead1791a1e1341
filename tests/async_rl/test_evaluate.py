"""`python -m async_rl.evaluate`: refusals before any process starts."""

import json
import math

import pytest

from async_rl.config import load_config, plain_values
from async_rl.evaluate import main
from async_rl.metrics.validation import ValidationResult
from async_rl.run import EXIT_FAILED, EXIT_REFUSED
from recipes.calculator.model import TinyModelConfig, save_initial_checkpoint
from recipes.calculator.tokenizer import build_tokenizer


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    save_initial_checkpoint(folder, tokenizer=build_tokenizer(), seed=0, config=TinyModelConfig())
    return folder


@pytest.fixture
def run(tmp_path, model):
    """A run directory with a checkpoint of step 2 and a final model, whose weights are not those of step 2."""
    directory = tmp_path / "run"
    step = directory / "checkpoints" / "step-000002"
    step.mkdir(parents=True)
    (step / "run.json").touch()
    (directory / "config.yaml").write_text(json.dumps(plain_values(load_config([f"output_dir={directory}"]))))
    (directory / "final").symlink_to(model)
    return directory


def refused(capsys, *arguments):
    """The lines of the error."""
    assert main([str(argument) for argument in arguments]) == EXIT_REFUSED
    return capsys.readouterr().err.splitlines()


def test_evaluate_refuses_a_folder_without_a_model(capsys, tmp_path):
    (line,) = refused(capsys, tmp_path)
    assert line.startswith(f"error: {tmp_path} has no config.json")


def test_evaluate_of_a_model_needs_a_task(capsys, model):
    (line,) = refused(capsys, model)
    assert "no task is given" in line and "--task FILE.py" in line
    (line,) = refused(capsys, model, "task=calculator", "validation.prompts=0")
    assert "validation.prompts is 0" in line


@pytest.mark.parametrize("failed", [True, False])
def test_evaluate_fails_if_all_rollouts_do_and_writes_json_that_others_read(
    failed, capsys, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rollouts = [] if failed else [1.0]
    result = ValidationResult(
        success_rate=1.0 if rollouts else math.nan,
        prompts=1,
        failed=int(failed),
        cut_off=0,
        mean_tokens=math.nan,
        min_version=-1,
        max_version=-1,
        first_error="no reward",
    )

    async def run(evaluation, out):
        evaluation._write(result, out)
        return result

    monkeypatch.setattr("async_rl.controller.evaluation.Evaluation.run", run)
    assert main([str(model), "task=calculator", "output_dir=results"]) == (EXIT_FAILED if failed else 0)
    assert main([str(model), "task=calculator", "output_dir=results"]) == (EXIT_FAILED if failed else 0)
    assert ("no reward" in capsys.readouterr().err) == failed
    for number in (1, 2):
        text = (tmp_path / "results" / f"evaluation-{number}" / "result.json").read_text()
        assert json.loads(text, parse_constant=pytest.fail)["model"] == str(model)
    assert not list(model.glob("evaluation-*"))


def test_evaluate_refuses_options_that_do_not_apply(capsys, model, run):
    (line,) = refused(capsys, run, "--task", "mine.py")
    assert "--task" in line
    (line,) = refused(capsys, model, "--step", "2")
    assert "--step" in line
    (line,) = refused(capsys, run, "--step", "4")
    assert "step 4" in line and "steps 2" in line
    (line,) = refused(capsys, run, "--out", model)
    assert "--out" in line


def test_evaluate_refuses_all_that_cannot_work_together(capsys, run):
    lines = refused(capsys, run, "validation.prompts=0", "engine.tensor_parallel=8", "task.options.modulus=3")
    assert len(lines) == 3, lines
    for line, named in zip(lines, ("task.options", "validation.prompts is 0", "heads"), strict=True):
        assert named in line
    (line,) = refused(capsys, run, "validation.sampling.temperature=-1")
    assert "sampling.temperature is -1" in line
    assert not list(run.glob("evaluation-*"))
