"""`python -m async_rl.run [overrides]`: Hydra -> RunConfig -> Launcher.

Exit codes: 0 done or stopped on request, 1 a stage failed, 2 the run cannot be started as asked, 130 stopped at once.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, as the imports below take seconds
    from async_rl.files.command import end_process

    end_process("async_rl.run")

import argparse
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from async_rl.compat.garbage import make_collections_rare, no_collections
from async_rl.files.command import EXIT_INTERRUPTED, prog, run_loop, words
from async_rl.files.logs import notes_of
from async_rl.files.masking import MASK, mask_text, masked
from async_rl.files.owner import living_owner, owned

EXIT_FAILED = 1
EXIT_REFUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run once; returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with contextlib.ExitStack() as stack:
        return _run(arguments, stack)


def _run(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    """`main`; the run directory is owned until `stack` is closed."""
    from async_rl.config import (
        CONFIGS,
        RECIPES,
        build_config,
        composed_values,
        plain_values,
        recipe_overrides,
    )  # after the environment is set; a check of the device imports torch

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
        text = failure_text(error)
        sys.stderr.write(text)
        with contextlib.suppress(OSError), (config.output_dir / "logs" / "driver.log").open("a") as log:
            log.write(text)
        return EXIT_FAILED
    return 0


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
    return shlex.join(
        [
            *words("run"),
            *options,
            *overrides,
            f"output_dir={hydra_value(str(output_dir))}",
            "resume=auto",
        ]
    )


def _masked(override: str) -> str:
    """The override, with a mask as its value if that contains a secret."""
    name, _, text = override.partition("=")
    value: Any = OverridesParser.create().parse_override(override).value() if text else text
    for key in reversed(name.lstrip("+~").split(".")):
        value = {key: value}
    return f"{name}={hydra_value(MASK)}" if masked(value) != value else override


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
    """One line per leaf of an exception group: the chain from what failed to why."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from causes(inner)
        return
    if isinstance(error.__cause__, BaseExceptionGroup):
        yield from (f"{error}: {line}" for line in causes(error.__cause__))
        return
    chain, link = [f"{error}" or repr(error)], error.__cause__
    while link is not None and not isinstance(link, BaseExceptionGroup):
        chain.append(f"{type(link).__name__}: {link}")
        link = link.__cause__
    if link is not None:
        yield from (f"{': '.join(chain)}: {line}" for line in causes(link))
    else:
        yield ": ".join(chain).replace("\n", " ")


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
    add(
        "--check",
        action="store_true",
        help="check config, task, model and files without starting a process, print a summary, and exit",
    )
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
