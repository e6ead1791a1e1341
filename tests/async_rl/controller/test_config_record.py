"""The config in a run directory, and the changes that a start reports."""

import pytest
import yaml

from async_rl.config import load_config
from async_rl.controller.resume import record_config


def configs(directory):
    return {path.name: yaml.safe_load(path.read_text()) for path in directory.glob("*.yaml")}


def started(directory, *overrides, step=0):
    """Changes that a start from checkpoint `step` finds."""
    return record_config(directory, load_config(list(overrides)), train_step=step)


def test_a_config_record_is_of_the_first_start_and_changes_are_beside_it(tmp_path):
    assert started(tmp_path, "+optimizer.eps=1e-8", "name='ü'") == []
    first = configs(tmp_path)["config.yaml"]
    assert first["optimizer"]["eps"] == 1e-8 and first["name"] == "ü" and first["resume"] == "auto"
    assert first["optimizer"]["betas"] == [0.9, 0.95] and first["output_dir"].endswith("ü")
    changes = started(tmp_path, "optimizer.lr=1e-3", "name='ü'", step=20)
    assert changes == ["optimizer.lr: 0.0005 -> 0.001", "optimizer.min_lr: 5e-05 -> 0.0001"]
    assert 'loss.name: "decoupled_ppo" -> "gspo"' in started(tmp_path, "loss=gspo", "name='ü'", step=40)
    assert configs(tmp_path)["config.yaml"] == first
    assert configs(tmp_path)["config-000020.yaml"]["optimizer"]["lr"] == 1e-3


def test_config_records_compare_with_the_last_start(tmp_path):
    started(tmp_path)
    assert started(tmp_path, "resume=never", step=10) == []
    started(tmp_path, "optimizer.lr=1e-3", step=20)
    assert started(tmp_path, "optimizer.lr=1e-3", step=40) == []
    assert started(tmp_path, step=60) == ["optimizer.lr: 0.001 -> 0.0005", "optimizer.min_lr: 0.0001 -> 5e-05"]
    assert sorted(configs(tmp_path)) == ["config-000020.yaml", "config-000060.yaml", "config.yaml"]


@pytest.mark.parametrize(("overrides", "left"), [((), set()), (("seed=1",), {"config-000020.yaml"})])
def test_config_records_of_repeated_steps_go(tmp_path, overrides, left):
    started(tmp_path)
    started(tmp_path, "optimizer.lr=1e-3", step=40)
    assert "optimizer.lr: 0.001 -> 0.0005" in started(tmp_path, *overrides, step=20)
    assert set(configs(tmp_path)) == {"config.yaml", *left}


def test_a_config_record_that_cannot_be_read_is_kept(tmp_path):
    (tmp_path / "config.yaml").write_text("a: [")
    assert started(tmp_path, step=3)
    assert (tmp_path / "config.yaml").read_text() == "a: [" and (tmp_path / "config-000003.yaml").exists()


def test_secrets_are_neither_recorded_nor_reported(tmp_path):
    """A record of an earlier version may have them in clear."""
    secrets = ("endpoint.run_key=k3y-0", "cluster.replica_env.HF_TOKEN=t0ken", "task.options.api_key=k3y-0")
    assert started(tmp_path, *secrets) == []
    text = (tmp_path / "config.yaml").read_text()
    assert "k3y" not in text and "t0ken" not in text and "HF_TOKEN" in text
    assert started(tmp_path, *(word.replace("0", "1") for word in secrets), step=2) == []
    (tmp_path / "config.yaml").write_text(text.replace("run_key: <secret>", "run_key: k3y-0"))
    assert started(tmp_path, *secrets, step=2) == []
    assert set(started(tmp_path, step=2)) == {
        'task.options.api_key: "<secret>" -> -',
        'cluster.replica_env.HF_TOKEN: "<secret>" -> -',
        'endpoint.run_key: "<secret>" -> null',
    }
