"""State from which a run continues: the last checkpoint of its directory, and the journal of later events."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from async_rl.config import ConfigError, RunConfig
from async_rl.controller.checkpoints import Checkpoints, RunState, read_run_state
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
        self.checkpoint = _latest(config) if again else _checkpoint_to_resume(config)
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
            "trained again, "
            f"{len(restored.open)} groups in flight with {tokens} tokens go on"
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


def _latest(config: RunConfig) -> Path | None:
    return Checkpoints(config.output_dir / "checkpoints", config=config.checkpoint).latest()


def _checkpoint_to_resume(config: RunConfig) -> Path | None:
    """The checkpoint that `resume` asks for.

    Raises:
        ConfigError: `resume=never` on a run directory that holds a run.
    """
    match config.resume:
        case "auto":
            return _latest(config)
        case "never":
            if (config.output_dir / "metrics.jsonl").exists() or any(config.output_dir.glob("journal/*.sqlite")):
                raise ConfigError(
                    f"output_dir is {config.output_dir}, which holds a run, and resume=never; "
                    "give another output_dir, remove it, or use resume=auto"
                )
            return None
        case path:
            return path
