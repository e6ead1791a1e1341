"""Losses and baselines of a user's file in the config of a run."""

import os
import subprocess
import sys

import cloudpickle
import pytest

from async_rl.config import ConfigError, build_config, load_config, plain_values
from tests.docs.pages import module_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with the file of the guide."""
    (tmp_path / "my_algorithm.py").write_text(module_of("docs/guides/loss.md", "my_algorithm.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


OF_A_BEGINNER = """
from agent_loop.bounds import bounded
from async_rl.trainer.batch.advantage import Advantage
from async_rl.trainer.loss.losses import PolicyLoss, Surrogate


class Plain:
    pass


class Undecorated(PolicyLoss):
    cap: float = 2.0

    def surrogate(self):
        return Surrogate(())


@bounded("loss")
class Empty(PolicyLoss):
    cap: float = 2.0


@bounded("loss")
class Raises(PolicyLoss):
    def surrogate(self):
        return self.capp


@bounded("loss")
class Nothing(PolicyLoss):
    def surrogate(self):
        Surrogate(())


@bounded("loss")
class RaisesAtOnce(PolicyLoss):
    def __post_init__(self):
        raise KeyError("wish")

    def surrogate(self):
        return Surrogate(())


@bounded("loss")
class UnknownType(PolicyLoss):
    cap: "Wish" = 2.0

    def surrogate(self):
        return Surrogate(())


@bounded("loss")
class NoSetting(PolicyLoss):
    cap: memoryview | None = None

    def surrogate(self):
        return Surrogate(())


@bounded("advantage")
class Whole(Advantage):
    compares = "world"

    def of(self, rewards):
        return None


@bounded("advantage")
class Without(Advantage):
    compares = "batch"
"""


LOSS, BASELINE = "loss.name=my_algorithm.py:CappedProximal", "advantage.name=my_algorithm.py:OverThreshold"


def test_a_stored_config_finds_its_classes_from_another_directory(folder, monkeypatch):
    config = load_config([LOSS, "loss.cap=1.5", BASELINE, "rollout.trajectories_per_group=1"])
    assert config.loss.cap == 1.5 and config.loss.name == f"{folder / 'my_algorithm.py'}:CappedProximal"
    monkeypatch.chdir("/")
    assert build_config(plain_values(config)) == config


def test_a_class_of_a_file_is_known_to_a_process_that_cannot_import_it(folder):
    made = cloudpickle.dumps(load_config([LOSS]).loss)
    script = "import pickle, sys; print(pickle.load(sys.stdin.buffer).surrogate().score)"
    paths = [path for path in sys.path if path != str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", script], input=made, capture_output=True, cwd="/", env=environment)
    assert done.stdout == b"True\n", done.stderr


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([LOSS, "loss.cap=-3"], ["loss.cap is -3", "> 0"]),
        ([LOSS, "loss.capp=3"], ["loss.capp", "loss.cap"]),
        ([BASELINE.replace("OverThreshold", "Wish")], ["advantage.name", "Wish"]),
        (["loss.name=wish.py:Loss"], ["loss.name", "wish.py"]),
        (["loss.name=wish_module:Loss"], ["loss.name", "wish_module"]),
        (["loss.name=my_algorithm.py:OverThreshold"], ["loss.name", "no subclass of PolicyLoss"]),
        (["loss.name=my_algorithm.py:np"], ["loss.name", "name a class"]),
        (["loss.name=beginner.py:Plain"], ["no subclass of PolicyLoss"]),
        (["loss.name=json:JSONDecoder"], ["no subclass of PolicyLoss"]),
        (["advantage.name=beginner.py:Plain"], ["no subclass of Advantage"]),
        (["loss.name=beginner.py:Undecorated"], ["cap cannot be set", "@bounded('loss')"]),
        (["loss.name=beginner.py:Undecorated", "loss.cap=3"], ["cap cannot be set", "@bounded('loss')"]),
        (["loss.name=beginner.py:Empty"], ["no method surrogate"]),
        (["loss.name=beginner.py:Raises"], ["has no attribute 'capp'", "in surrogate"]),
        (["loss.name=beginner.py:Nothing"], ["surrogate returns None"]),
        (["loss.name=beginner.py:RaisesAtOnce"], ["KeyError: 'wish'", "in __post_init__"]),
        (["loss.name=beginner.py:UnknownType"], ["'Wish' is not defined"]),
        (["loss.name=beginner.py:NoSetting"], ["which failed", "memoryview"]),
        (["advantage.name=beginner.py:Whole"], ["compares='world'", "'group' or 'batch'"]),
        (["advantage.name=beginner.py:Without"], ["no method of"]),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_by_key_and_name(folder, overrides, parts):
    (folder / "beginner.py").write_text(OF_A_BEGINNER)
    with pytest.raises(ConfigError) as error:
        load_config(overrides)
    assert all(part in str(error.value) for part in parts)
