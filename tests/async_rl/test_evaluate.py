"""`python -m async_rl.evaluate`: refusals before any process starts."""

import json
import math

import pytest

from async_rl.config import load_config, plain_values
from async_rl.evaluate import main
from async_rl.run import EXIT_FAILED, EXIT_REFUSED
from recipes.calculator.model import TinyModelConfig, save_initial_checkpoint
from recipes.calculator.tokenizer import build_tokenizer
from tests.async_rl.metrics.test_observe import validated


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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("{folder}", [["{folder} has no config.json"]]),
        ("{model}", [["no task is given", "--task FILE.py"]]),
        ("{model} task=calculator validation.prompts=0", [["validation.prompts is 0"]]),
        ("{model} --step 2", [["--step"]]),
        ("{run} --task mine.py", [["--task"]]),
        ("{run} --step 4", [["step 4", "steps 2"]]),
        ("{run} --out {model}", [["--out"]]),
        ("{run} validation.sampling.temperature=-1", [["sampling.temperature is -1"]]),
        (
            "{run} validation.prompts=0 engine.tensor_parallel=8 task.options.modulus=3",
            [["task.options"], ["validation.prompts is 0"], ["heads"]],
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_a_line_for_each_problem(
    arguments, named, capsys, model, run, tmp_path
):
    places = {"folder": tmp_path, "model": model, "run": run}
    assert main(arguments.format(**places).split()) == EXIT_REFUSED
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(named), lines
    for line, parts in zip(lines, named, strict=True):
        assert line.startswith("error: ") and all(part.format(**places) in line for part in parts), line
    assert not list(run.glob("evaluation-*"))


@pytest.mark.parametrize("failed", [True, False])
def test_evaluate_fails_if_all_rollouts_do_and_writes_json_that_others_read(
    failed, capsys, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = validated(math.nan, failed=8, first_error="no reward") if failed else validated(1.0)

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
