"""State from which a run continues: the last checkpoint of its directory, and the journal of later events.

The config of a run is in its directory: that of the first start, and one more for each start that changed it.

    config.yaml           of the first start
    config-000020.yaml    of the steps after 20, because the start that resumed from step 20 changed something
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from async_rl.config import ConfigError, RunConfig, plain_values
from async_rl.controller.checkpoints import Checkpoints, RunState, read_run_state
from async_rl.files.atomic_dir import whole_file
from async_rl.files.masking import differences, masked
from async_rl.files.owner import living_owner
from async_rl.files.rollouts import FOLDER, truncate_steps
from async_rl.metrics.recorder import Recorder
from async_rl.rollout.group_contents import ContentPlace, StoredContent
from async_rl.rollout.prompts import FailedPrompts, PromptOrder, PromptSource
from message_queue.errors import JournalError
from message_queue.journal import check_owner
from message_queue.recovery import JournalPlace, Restored
from message_queue.tokens import RoutingSpec

MAX_NAME_BYTES = 40
FIRST = "config.yaml"


class Resume:
    """Read when it is made.

    Args:
        again: the same run continues from its latest checkpoint, regardless of `resume`.

    Attributes:
        checkpoint: folder of the checkpoint; None for a run without one.
        state: the driver's state in that checkpoint.

    Raises:
        ConfigError: the directory holds a run where `resume=never`, or the journal of another.
        ValueError: the checkpoint cannot be read.
    """

    def __init__(self, config: RunConfig, *, again: bool = False) -> None:
        self._config = config
        self.checkpoint, self.state = None, RunState()
        if living_owner(config.output_dir) is not None:
            return  # a check, not a start: the run there changes what would be read
        self.checkpoint = _checkpoint_to_resume(config, asked="auto" if again else config.resume)
        try:
            check_owner(config.output_dir / "journal", run=run_name(config))
        except JournalError as error:
            raise ConfigError(str(error)) from error
        if self.checkpoint is not None:
            self.state = read_run_state(self.checkpoint)

    @property
    def source(self) -> Path | None:
        """The checkpoint if it is that of another run."""
        own = self.checkpoint is not None and self._config.output_dir.resolve() in self.checkpoint.resolve().parents
        return None if own else self.checkpoint

    def journal(self) -> JournalPlace:
        """Location of the journal, and the checkpoint that it must match."""
        config = self._config
        return JournalPlace(
            directory=config.output_dir / "journal",
            run=run_name(config),
            config=config.journal,
            settings={
                "staleness.max_staleness": config.staleness.max_staleness,
                "staleness.policy": config.staleness.policy,
                "rollout.groups_per_batch": config.rollout.groups_per_batch,
                "rollout.trajectories_per_group": config.rollout.trajectories_per_group,
                "rollout.resume_routing": config.rollout.resume_routing,
                "trainer.updates_per_batch": config.trainer.updates_per_batch,
                "teachers": ", ".join(f"{name} {each.checkpoint}" for name, each in config.teachers.items()),
                "distillation.top_k": config.distillation.num_ids,
            },
            checkpoint=None if self.checkpoint is None else self.state.queue,
            train_step=self.state.train_step,
            prompt_cursor=self.state.prompt_cursor,
            waiting=self.state.unfinished_prompts,
        )

    def content(self, routing: RoutingSpec | None) -> ContentPlace:
        """Where rollouts store their content."""
        config = self._config
        return ContentPlace(
            directory=config.output_dir / "journal" / "content",
            run=run_name(config),
            fsync=config.journal.fsync,
            trajectories=config.rollout.trajectories_per_group,
            routing=routing,
            resume_routing=config.rollout.resume_routing,
        )

    def truncate_records(self, restored: Restored, stored: StoredContent, recorder: Recorder) -> None:
        """Rewind the records of the run to its restart point, and report it."""
        step = self.state.train_step
        own = self.checkpoint is not None and self.source is None
        elsewhere = restored.began and not own
        recorder.resume_after(
            step,
            next_group=0 if elsewhere else restored.next_group,
            live=restored.live | restored.given_up,
            trained=self.state.queue.ledger.trained if own else None,
        )
        truncate_steps(self._config.output_dir / FOLDER, train_step=step)
        if failed := failed_prompts(self._config.output_dir, restored).prompts:
            recorder.note(f"{len(failed)} prompts whose groups failed until the run stopped are admitted again")
        if self.checkpoint is None and restored.began:
            return
        open_groups = [stored.groups[a.group] for a in restored.open if a.group in stored.groups]
        tokens = sum(group.num_tokens for group in open_groups)
        recorder.note(
            f"goes on after train step {step}: {restored.replay * self._config.trainer.updates_per_batch} steps are "
            f"trained again, {len(restored.open)} groups in flight with {tokens} tokens go on"
        )
        for line in (*restored.notes, *stored.notes):
            recorder.note(line)

    def prompts(self, order: PromptOrder, restored: Restored) -> PromptSource:
        """Prompts whose groups are in the journal, or ended in it, are not handed out a second time.

        Those whose groups failed one after the other until the run stopped (`rollout.max_failed_groups`) are.
        """
        return PromptSource(
            order,
            cursor=restored.prompt_cursor,
            unfinished=restored.waiting,
            failed=failed_prompts(self._config.output_dir, restored),
        )


def failed_prompts(directory: Path, restored: Restored) -> FailedPrompts:
    """Those of a run directory, without prompts that are in a group after all and those that the cursor comes to."""
    failed = FailedPrompts(directory / "failed_prompts.json")
    in_flight = {group.prompt for group in restored.open}
    failed.discard([p for p in failed.prompts if p in in_flight or p >= restored.prompt_cursor])
    return failed


def run_name(config: RunConfig) -> str:
    """Identity of a run's journal: the name, or its digest if the name is long, and the seed."""
    name = config.name if len(config.name.encode()) <= MAX_NAME_BYTES else sha256(config.name.encode()).hexdigest()[:32]
    return f"{name} seed {config.seed}"


def _checkpoint_to_resume(config: RunConfig, *, asked: Path | str) -> Path | None:
    """The checkpoint that `resume` asks for; ConfigError if it is `never` and the directory holds a run."""
    match asked:
        case "auto":
            return Checkpoints(config.output_dir / "checkpoints", config=config.checkpoint).latest()
        case "never":
            if (config.output_dir / "metrics.jsonl").exists() or any(config.output_dir.glob("journal/*.sqlite")):
                raise ConfigError(
                    f"output_dir is {config.output_dir}, which holds a run, and resume=never; "
                    "give another output_dir, remove it, or use resume=auto"
                )
            return None
        case path:
            return Path(path)


def record_config(directory: Path, config: RunConfig, *, train_step: int) -> list[str]:
    """Write the config if it is the first or differs from the newest one.

    Args:
        train_step: step that the run resumes from. Configs of later steps are removed: their steps are repeated.

    Returns:
        `field: old -> new` of each field that changed since the last start.
    """
    current = plain_values(config)
    if not (directory / FIRST).exists():
        _write(directory / FIRST, current)
        return []
    recorded = [directory / FIRST, *sorted(directory.glob("config-??????.yaml"))]
    changed = list(differences(_read(recorded[-1]), current))
    later = [path for path in recorded[1:] if path > _path_of(directory, train_step)]
    for path in later:
        path.unlink()
    newest = [path for path in recorded if path not in later][-1]
    if any(differences(_read(newest), current)):
        _write(_path_of(directory, train_step), current)
    return changed


def another_run(config: RunConfig) -> Iterator[str]:
    """Why this run cannot continue the run in `output_dir`: that has another task or model."""
    directory = config.output_dir
    started = any(directory.glob("journal/*.sqlite")) or any(directory.glob("checkpoints/step-*"))
    if not started or not (directory / FIRST).is_file():
        return
    recorded, current = _read(newest_config(directory)), plain_values(config)
    for section, field in (("task", "factory"), ("model", "checkpoint")):
        old, new = recorded.get(section, {}).get(field), current[section][field]
        if Path(old or "").name != Path(new or "").name:
            yield (
                f"output_dir is {directory}, which holds a run with {section}.{field}={old}, and this one has {new}; "
                "give another output_dir, or remove that run"
            )


def newest_config(directory: Path) -> Path:
    """File of the config that the last start of the run in `directory` used.

    Raises:
        ValueError: there is none.
    """
    recorded = [path for path in (directory / FIRST, *sorted(directory.glob("config-??????.yaml"))) if path.is_file()]
    if not recorded:
        raise ValueError(f"{directory} has no {FIRST}; give the output_dir of a run that was started")
    return recorded[-1]


def _path_of(directory: Path, train_step: int) -> Path:
    """Of the config of the steps after `train_step`."""
    return directory / f"config-{train_step:06d}.yaml"


def _write(path: Path, values: Mapping[str, Any]) -> None:
    with whole_file(path) as file:
        file.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _read(path: Path) -> Mapping[str, Any]:
    """Values of a config; none if it is not YAML any more, so that each field counts as changed."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        values = None
    return masked(values) if isinstance(values, Mapping) else {}
