"""`python -m async_rl.export`: refusals before any weight is read."""

import json
from dataclasses import asdict

import pytest

from async_rl.export import EXIT_REFUSED, main
from async_rl.trainer.model.model import TrainerConfig


@pytest.fixture
def run(tmp_path):
    """A run directory with checkpoints of steps 2 and 4, the latter half removed."""
    directory = tmp_path / "run"
    (directory / "model").mkdir(parents=True)
    (directory / "config.yaml").write_text(json.dumps({"trainer": asdict(TrainerConfig())}))
    for step in (2, 4):
        (directory / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    (directory / "checkpoints" / "step-000002" / "run.json").touch()
    return directory


def refused(capsys, *arguments):
    """The one line of the error."""
    assert main([str(argument) for argument in arguments]) == EXIT_REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def test_export_refuses_a_folder_that_is_no_run_directory(capsys, tmp_path, run):
    assert str(tmp_path / "nowhere") in refused(capsys, tmp_path / "nowhere")
    assert "config.yaml" in refused(capsys, tmp_path)
    (run / "config.yaml").write_text("trainer: 3")
    assert "config.yaml" in refused(capsys, run)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export_refuses_a_step_without_a_whole_checkpoint_and_an_output_that_exists(capsys, run):
    from tests.helpers.tiny_models import qwen3_dense_config

    assert "--step" in refused(capsys, run, "--step", 4)
    qwen3_dense_config(num_hidden_layers=1).save_pretrained(run / "model")
    assert "trainer.json" in refused(capsys, run), "it is damaged"
    assert not (run / "export").exists()
    (run / "export" / "step-000002").mkdir(parents=True)
    assert "--out" in refused(capsys, run)
    assert "--out" in refused(capsys, run, "--out", run / "model")
    (run / "checkpoints" / "step-000002" / "run.json").unlink()
    assert str(run / "checkpoints") in refused(capsys, run)
