"""A validation round on a checkpoint, without a trainer: replicas, rollout workers, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from async_rl.config import RunConfig, plain_values
from async_rl.controller.parts import WATCH_EVERY_S, run_stage
from async_rl.controller.preflight import check_evaluation
from async_rl.controller.processes import Processes, place_run
from async_rl.controller.recovery import supervised
from async_rl.files.atomic_dir import make_folder
from async_rl.inference.pool import ReplicaPool
from async_rl.metrics.console import RunConsole
from async_rl.metrics.recorder import strict_json
from async_rl.metrics.validation import ValidationResult, write_rollouts
from async_rl.rollout.dispatcher import Dispatcher

RESULT, ROLLOUTS = "result.json", "rollouts.jsonl"
"""Files of the metrics and of all rollouts."""


class Evaluation:
    """One validation round. What can be refused is refused in the constructor, before any process starts.

    Args:
        checkpoint: Hugging Face folder of any model that the engine serves.
        train_step: step of the checkpoint, for the records.

    Raises:
        ConfigError: a line per problem, with field, value and way out.
    """

    def __init__(self, config: RunConfig, checkpoint: Path, *, train_step: int) -> None:
        # Nothing is trained: no routing rows are needed.
        trainer = replace(config.trainer, router_replay="none", replay_threshold=0.0)
        rollout = replace(config.rollout, resume_routing="append")
        model = replace(config.model, checkpoint=checkpoint)
        self._config = replace(config, trainer=trainer, rollout=rollout, model=model, schedule=None)
        self._checkpoint = checkpoint
        self._train_step = train_step
        self._task, self._held_out = check_evaluation(self._config, checkpoint)

    async def run(self, out: Path) -> ValidationResult:
        """Roll out the held-out prompts, and write the results.

        Args:
            out: folder of the results; created.

        Raises:
            Exception: whatever made it fail; every process is stopped before it is raised.
        """
        config, logs = self._config, out / "logs"
        make_folder(logs)
        async with contextlib.AsyncExitStack() as stack:
            console = RunConsole(total_train_steps=0, log=logs / "driver.log")
            stack.callback(console.close)
            for text in self._task.notes:
                console.note(text)
            processes = Processes(
                config,
                task=self._task,
                placement=await place_run(config, ranks=0, stack=stack, status=partial(console.phase, "Ray")),
                stack=stack,
                weights_directory=None,
                directory=out,
                console=console,
            )
            workers = processes.create_rollout_workers()
            pool = ReplicaPool(await processes.start_engines(self._checkpoint), on_lost=console.warn)
            await processes.start_rollout_workers(workers, pool)
            note, limits = console.warn, config.supervision
            rollouts = Dispatcher(workers, pool=pool, processes=processes, config=limits, note=note)
            _, supervisor = supervised(config, pool, rollouts=rollouts, start=processes.replace_replica, note=note)
            num_prompts, samples = sum(map(len, self._held_out.values())), config.validation.samples
            console.phase("workers", f"roll out {num_prompts} held-out prompts x {samples}")
            watch = partial(supervisor.watch, every_s=WATCH_EVERY_S, timeout_s=config.sync.timeout_s)
            async with asyncio.TaskGroup() as tasks:
                stages = {"workers": rollouts.watch, "watch": watch}
                background = [tasks.create_task(run_stage(name, work)) for name, work in stages.items()]
                result = await rollouts.validate(self._held_out, 1, samples=samples)
                for task in background:
                    task.cancel()
            console.validation(self._train_step, result)
            if result.failed:
                console.warn(f"{result.failed} rollouts failed; the first error: {result.first_error}")
        self._write(result, out)
        return result

    def _write(self, result: ValidationResult, out: Path) -> None:
        config = plain_values(self._config)
        (out / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        write_rollouts(out / ROLLOUTS, result, train_step=self._train_step)
        record = {"model": str(self._checkpoint), "train_step": self._train_step, **result.metrics()}
        (out / RESULT).write_text(strict_json(record, indent=2) + "\n")
