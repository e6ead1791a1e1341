"""`python -m async_rl.run [overrides]`: Hydra -> RunConfig -> Launcher.

Exit codes: 0 done or stopped on request, 1 a stage failed, 2 the run cannot be started as asked, 130 stopped at once.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, as the imports below take seconds
    from async_rl.files.command import end_process

    end_process("async_rl.run")

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from agent_loop.user_errors import user_line
from async_rl.compat.garbage import make_collections_rare, no_collections
from async_rl.files.atomic_dir import whole_file
from async_rl.files.command import EXIT_INTERRUPTED, prog, run_loop, words
from async_rl.files.logs import notes_of
from async_rl.files.masking import MASK, mask_text, masked
from async_rl.files.owner import living_owner, owned

if TYPE_CHECKING:
    from async_rl.metrics.callbacks import RunEvent
    from async_rl.rollout.task import Task

EXIT_FAILED = 1
EXIT_REFUSED = 2
_OF_OBJECT = ("task=python", "task.factory=task.pkl:task")  # the folder is added


def main(argv: Sequence[str] | None = None) -> int:
    """Run once; returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with contextlib.ExitStack() as stack:
        return _run(arguments, stack)


def _run(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    """`main`; the run directory is owned until `stack` is closed."""
    from async_rl.config import CONFIGS, RECIPES, build_config, composed_values, plain_values, recipe_overrides

    try:
        given: list[str] = arguments.overrides
        recipe = recipe_overrides(RECIPES / arguments.recipe / "recipe.yaml", given) if arguments.recipe else []
        values = composed_values(
            [*recipe, *task_overrides(arguments.task), *given],
            config_name=arguments.config_name,
            config_dir=arguments.config_dir or CONFIGS,
        )
        if not (arguments.show or arguments.check) and isinstance(directory := values.get("output_dir"), str):
            stack.enter_context(owned(_absolute(directory)))  # before anything is written, or takes time
        config = build_config(values)
        if arguments.show:
            sys.stdout.write(yaml.safe_dump(plain_values(config), sort_keys=False, allow_unicode=True))
            return 0
        if arguments.check:
            from async_rl.controller.preflight import check_run
            from async_rl.controller.summary import summary

            checked = check_run(config)
            sys.stdout.write(summary(config))
            sys.stdout.writelines(f"warning   {text}\n" for text in checked.warnings)
            if owner := living_owner(config.output_dir):
                sys.stdout.write(f"in use    {owner} owns {config.output_dir}; a start is refused until it ends\n")
            return 0
        with no_collections():
            from async_rl.controller.launcher import Launcher

        program = Launcher(config, resume_command=resume_command(arguments, output_dir=config.output_dir))
        make_collections_rare()
    except ValueError as error:
        sys.stderr.write("".join(f"error: {mask_text(line)}\n" for line in f"{error}".splitlines()))
        return EXIT_REFUSED
    try:
        run_loop(program.run())
    except KeyboardInterrupt:
        sys.stderr.write("stopped at once; the last checkpoint stands\n")
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever ended the run is reported as its last lines
        sys.stderr.write(_logged_failure(error, config.output_dir))
        return EXIT_FAILED
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Result of `train`."""

    output_dir: Path
    """Directory of the run."""
    finished: bool
    """Whether all train steps were done; False after Ctrl-C, and then the same call continues the run."""
    model: Path | None
    """Hugging Face folder of the trained model; None if the run was stopped."""
    metrics: Mapping[str, Any]
    """Metrics of the last train step, as in metrics.jsonl."""
    validation: Mapping[str, Any]
    """Metrics of the last validation, as in validation.jsonl; empty without one."""

    @classmethod
    def of(cls, directory: Path, *, finished: bool) -> TrainResult:
        """The result of the run in a directory."""
        model = directory / "final" if finished else None
        metrics, validation = (_last(directory / f"{name}.jsonl") for name in ("metrics", "validation"))
        return cls(output_dir=directory, finished=finished, model=model, metrics=metrics, validation=validation)


def train(
    task: Task | Callable[..., Task] | str | Path,
    config: Mapping[str, Any] | None = None,
    *,
    on_step: Callable[[RunEvent], Any] | None = None,
    on_publish: Callable[[RunEvent], Any] | None = None,
    on_validation: Callable[[RunEvent], Any] | None = None,
    on_end: Callable[[RunEvent], Any] | None = None,
) -> TrainResult:
    """Train as the command `async-rl run` does, from a script or a notebook, and return when the run has ended.

        train("products.py", {"model.checkpoint": PATH, "total_train_steps": 5}, on_step=print)

    The first Ctrl-C finishes the train step and saves, the second stops at once. The same call continues the run.
    A callback is a plain or async function. It is called while the run goes on, in order; an error in it, or more than
    a minute, is a warning. A step that a restart repeats is told once more.

    Args:
        task: a Task, a function that returns one, or `FILE.py` or `FILE.py:NAME` of either. An object is stored in the
            run directory (`task.pkl`), with the code that the script or notebook defines.
        config: values by dotted keys or nested, with the keys of the command's overrides.
        on_step: called after each train step. on_publish: when all replicas serve a version. on_validation: after a
            validation. on_end: at the end, also after a stop, but not after an error.

    Raises:
        ValueError: the run is refused before any process starts; a line per problem.
        RuntimeError: the run failed; the text has the ends of logs and the causes.
        KeyboardInterrupt: stopped at once.
    """
    from async_rl.config import build_config, composed_values
    from async_rl.rollout.task import PICKLED, pickled_task

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    callbacks: Any = {"step": on_step, "publish": on_publish, "validation": on_validation, "end": on_end}
    is_path = isinstance(task, str | Path)
    overrides = [*(task_overrides(str(task)) if is_path else _OF_OBJECT), *config_overrides(config or {})]
    with contextlib.ExitStack() as stack:
        values = composed_values(overrides)
        directory = _absolute(values["output_dir"])
        stack.enter_context(owned(directory))
        file = directory / "task.pkl"
        if not is_path:
            values["task"]["factory"] = f"{file}:task"
            overrides.append(f"task.factory={hydra_value(values['task']['factory'])}")
            PICKLED[file] = pickled_task(task)
            stack.callback(PICKLED.pop, file)
        from async_rl.controller.interrupt import run_in_thread
        from async_rl.controller.launcher import Launcher

        command = resume_command(_parse(overrides), output_dir=directory)
        program = Launcher(build_config(values), resume_command=command, callbacks=callbacks)
        if not is_path:
            with whole_file(file) as partial:
                partial.write_bytes(PICKLED[file])
        try:
            finished = run_in_thread(program.run)
        except Exception as error:
            raise RuntimeError(_logged_failure(error, directory).rstrip()) from error
    return TrainResult.of(directory, finished=finished)


def config_overrides(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Hydra overrides of a mapping with dotted or nested keys: `{"engine": "sglang", "rollout": {"workers": 2}}`.

    Raises:
        ValueError: a value is of no kind that a config has.
    """
    from async_rl.config import CONFIGS

    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from config_overrides(cast(Mapping[str, Any], value), f"{name}.")
        else:
            is_preset = isinstance(value, str) and (CONFIGS / name).is_dir()
            yield f"{name}={value if is_preset else _hydra_text(value, name=name)}"


def _hydra_text(value: Any, *, name: str) -> str:
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else repr(value).lower()
    if isinstance(value, str | Path):
        return hydra_value(str(value))
    if isinstance(value, list | tuple):
        return f"[{','.join(_hydra_text(each, name=name) for each in cast(Sequence[Any], value))}]"
    if isinstance(value, Mapping):
        parts = (f"{key}:{_hydra_text(each, name=name)}" for key, each in cast(Mapping[str, Any], value).items())
        return f"{{{','.join(parts)}}}"
    raise ValueError(f"{name} is {value!r}; give a text, a number, True, False, None, a list or a mapping of these")


def _last(path: Path) -> Mapping[str, Any]:
    """The last record of a file; empty if it has none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return json.loads(lines[-1]) if lines else {}


def task_overrides(task: str | None) -> list[str]:
    """Overrides for `--task FILE` or `--task FILE:NAME`."""
    if task is None:
        return []
    file, _, name = task.rpartition(":") if not task.endswith(".py") else (task, "", "task")
    return ["task=python", f"task.factory={hydra_value(f'{Path(file).resolve()}:{name}')}"]


def resume_command(arguments: argparse.Namespace, *, output_dir: Path) -> str:
    """Shell command that continues the run in `output_dir` with everything that `arguments` gave it.

    Secrets are masked; a start with a mask in place of a value is refused.
    """
    names = ("recipe", "config_name", "config_dir", "task")
    given = [(f"--{name.replace('_', '-')}", getattr(arguments, name)) for name in names]
    options = [word for option, value in given if value is not None for word in (option, str(value))]
    own = ("output_dir", "resume")
    overrides = [_masked(word) for word in arguments.overrides if word.partition("=")[0].lstrip("+") not in own]
    directory = f"output_dir={hydra_value(str(output_dir))}"
    return shlex.join([*words("run"), *options, *overrides, directory, "resume=auto"])


def _masked(override: str) -> str:
    """The override, with a mask as its value if that contains a secret."""
    name, _, text = override.partition("=")
    value: Any = OverridesParser.create().parse_override(override).value() if text else text
    for key in reversed(name.lstrip("+~").split(".")):
        value = {key: value}
    return f"{name}={hydra_value(MASK)}" if masked(value) != value else override


def _logged_failure(error: BaseException, directory: Path) -> str:
    """`failure_text`, also written to the log of the run."""
    text = failure_text(error)
    with contextlib.suppress(OSError), (directory / "logs" / "driver.log").open("a") as log:
        log.write(text)
    return text


def failure_text(error: BaseException) -> str:
    """The last lines of a run that failed: the ends of logs, and the chain of causes."""
    lines = (*log_ends(error), *(f"error: {line}" for line in causes(error)))
    return mask_text("".join(f"{line}\n" for line in lines))


def log_ends(error: BaseException) -> list[str]:
    """The ends of logs that an error and its causes carry as notes, each once."""
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    cause = () if error.__cause__ is None else (error.__cause__,)
    found = [*notes_of(error), *(note for part in (*inner, *cause) for note in log_ends(part))]
    return list(dict.fromkeys(found))


def causes(error: BaseException) -> Iterator[str]:
    """One line per leaf of an exception group: the chain from what failed to why, and the line of a user's code."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from causes(inner)
        return
    if isinstance(error.__cause__, BaseExceptionGroup):
        yield from (f"{error}: {line}" for line in causes(error.__cause__))
        return
    chain, last, link = [f"{error}" or repr(error)], error, error.__cause__
    while link is not None and not isinstance(link, BaseExceptionGroup):
        chain.append(f"{type(link).__name__}: {link}")
        last, link = link, link.__cause__
    if link is not None:
        yield from (f"{': '.join(chain)}: {line}" for line in causes(link))
    else:
        place = user_line(last)
        yield ": ".join(chain).replace("\n", " ") + (f" ({place})" if place else "")


def hydra_value(text: str) -> str:
    """A string as the value of a Hydra override; quoted where Hydra would read more than a string into it."""
    if re.fullmatch(r"[\w./-]*/[\w./-]*", text):
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", r"\'"), text)
    escaped = escaped.replace("${", r"\${")
    return f"'{escaped}'"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog("check" if "--check" in argv and "check" in sys.argv[1:2] else "run"),
        description="Train with asynchronous RL.",
        epilog=_groups(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--recipe", metavar="NAME", help="a folder of recipes/; its overrides come first")
    add("--task", metavar="FILE", help="FILE.py or FILE.py:NAME of a Task or of a function that returns one")
    add("--config-name", metavar="NAME", default="run", help="file of the config folder to start from, default: run")
    add("--config-dir", metavar="DIR", type=_absolute, help="folder of configs, default: those of the project")
    add("--show", action="store_true", help="print all values of the run as YAML, and exit")
    checks = "check config, task, model and files without starting a process, print a summary, and exit"
    add("--check", action="store_true", help=checks)
    add("overrides", metavar="key=value", nargs="*", help="for instance total_train_steps=5 engine.replicas=2")
    return parser.parse_intermixed_args(argv)  # options may stand between overrides


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _groups() -> str:
    """The presets, by group: files of the configs folder."""
    from async_rl.config import CONFIGS, preset_names

    groups = {folder.name: preset_names(folder) for folder in sorted(CONFIGS.iterdir())}
    lines = [f"  {name + '=':12}{' | '.join(choices)}" for name, choices in groups.items() if choices]
    return "\n".join(
        [
            "presets, chosen by GROUP=NAME (the list is that of the project's configs):",
            *lines,
            "",
            "Any field may be set by its dotted key, as in rollout.workers=2; task.options.NAME=VALUE sets a parameter",
            "of the task. --show lists all keys, and docs/reference explains them.",
            "",
            "exit codes: 0 done or stopped on request, 1 failed, 2 refused before any process started,",
            "130 stopped at once by Ctrl-C",
        ]
    )
