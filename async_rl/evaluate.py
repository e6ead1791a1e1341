"""`python -m async_rl.evaluate MODEL_OR_RUN [overrides]`: held-out prompts on a checkpoint or on the model of a run.

Exit codes: 0 done, 1 failed, 2 refused before any process started, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, as the imports below take seconds
    from async_rl.files.command import end_process

    end_process("async_rl.evaluate")

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from async_rl.files.command import EXIT_INTERRUPTED, prog, run_loop
from async_rl.files.masking import mask_text
from async_rl.run import EXIT_FAILED, EXIT_REFUSED, failure_text, hydra_value, task_overrides
from async_rl.weights.model_settings import local_checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate once; returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from async_rl.config import CONFIGS, RECIPES, RunConfig, load_config, recipe_overrides
    from async_rl.controller.resume import FIRST, newest_config

    try:
        directory = local_checkpoint(arguments.directory, key="MODEL_OR_RUN").absolute()
        is_run = (directory / FIRST).is_file()
        if is_run:
            if arguments.task or arguments.recipe:
                raise ValueError(f"{directory} is a run, which has its task; leave out --task and --recipe")
            recorded = newest_config(directory)
            config: RunConfig = load_config(arguments.overrides, config_name=recorded.stem, config_dir=directory)
            checkpoint, train_step = _model_of_run(directory, arguments.step)
        else:
            if arguments.step is not None:
                raise ValueError(f"--step is {arguments.step}, and {directory} is no run directory; leave it out")
            overrides = [f"model.checkpoint={hydra_value(str(directory))}", *arguments.overrides]
            if not (directory / "config.json").is_file():
                raise ValueError(f"{directory} has no config.json; give a checkpoint folder or the output_dir of a run")
            if not (arguments.task or arguments.recipe or any(word.startswith("task") for word in overrides)):
                raise ValueError(
                    f"{directory} is a model, and no task is given; give --task FILE.py, --recipe NAME or task=PRESET"
                )
            recipe = recipe_overrides(RECIPES / arguments.recipe / "recipe.yaml", overrides) if arguments.recipe else []
            config = load_config([*recipe, *task_overrides(arguments.task), *overrides], config_dir=CONFIGS)
            checkpoint, train_step = directory, 0
        from async_rl.controller.evaluation import Evaluation

        if arguments.out is not None and arguments.out.exists():
            raise ValueError(f"--out is {arguments.out}, which exists; remove it or give another folder")
        evaluation = Evaluation(config, checkpoint, train_step=train_step)
        out = arguments.out or _new_folder(directory if is_run else config.output_dir)
    except (ValueError, OSError) as error:
        sys.stderr.write("".join(f"error: {mask_text(line)}\n" for line in f"{error}".splitlines()))
        return EXIT_REFUSED
    try:
        result = run_loop(evaluation.run(out.absolute()))
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever ended it is reported as its last lines
        sys.stderr.write(failure_text(error))
        return EXIT_FAILED
    sys.stdout.write(f"{out}\n")
    if result.failed == result.num_rollouts:
        sys.stderr.write(f"error: all {result.failed} rollouts failed; the first error: {result.first_error}\n")
        return EXIT_FAILED
    return 0


def _model_of_run(directory: Path, step: int | None) -> tuple[Path, int]:
    """Checkpoint folder of a run, and its train step.

    Args:
        step: None for `final/`, or the newest checkpoint if the run has not ended. Checkpoints are exported once.

    Raises:
        ValueError: no such checkpoint.
    """
    from async_rl.export import checkpoint_of, export_checkpoint

    newest = checkpoint_of(directory, step)
    train_step = int(newest.name.removeprefix("step-"))
    if step is None and (directory / "final" / "config.json").is_file():
        return directory / "final", train_step
    exported = directory / "export" / newest.name
    return (exported if exported.is_dir() else export_checkpoint(directory, step=train_step)), train_step


def _new_folder(directory: Path) -> Path:
    """Make the first of evaluation-1, evaluation-2 and so on that does not exist."""
    for number in itertools.count(1):
        folder = directory / f"evaluation-{number}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog("evaluate"), description="Roll out held-out prompts, and report rewards and pass@k."
    )
    add = parser.add_argument
    add("directory", metavar="MODEL_OR_RUN", help="a Hugging Face folder, a name at the hub, or an output_dir")
    add("--step", type=int, default=None, help="train step of a checkpoint of the run, default: its final model")
    add("--recipe", metavar="NAME", help="for a model: a folder of recipes/; its overrides come first")
    add("--task", metavar="FILE", help="for a model: FILE.py or FILE.py:NAME of a Task")
    add("--out", type=Path, default=None, metavar="DIR", help="new folder, default: evaluation-N in the output_dir")
    example = "for instance validation.prompts=64 validation.samples=8 validation.sampling.temperature=0.6"
    add("overrides", metavar="key=value", nargs="*", help=example)
    return parser.parse_intermixed_args(argv)
