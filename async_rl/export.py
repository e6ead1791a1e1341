"""`python -m async_rl.export DIR [--step N] [--out PATH]`: a Hugging Face checkpoint from a checkpoint of a run.

Exit codes: 0 done, 2 the export cannot be made as asked.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, as the imports below take seconds
    from async_rl.files.command import end_process

    end_process("async_rl.export")

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from async_rl.files.command import prog
from async_rl.trainer.model.model import ParallelConfig, TrainerConfig

EXIT_REFUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Export once; returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        out = export_checkpoint(arguments.directory, step=arguments.step, out=arguments.out)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {str(error).replace(chr(10), ' ')}\n")
        return EXIT_REFUSED
    sys.stdout.write(f"{out}\n")
    return 0


def export_checkpoint(directory: Path, *, step: int | None = None, out: Path | None = None) -> Path:
    """Write checkpoint `step` of the run in `directory` as a Hugging Face checkpoint folder; returns the folder.

    Runs in this process alone, whatever layout the checkpoint was saved with. The optimizer's state is not read.

    Args:
        step: None for the newest. out: None for `directory`/export/step-NNNNNN.

    Raises:
        ValueError: not a run directory, no such checkpoint, or `out` exists.
        TrainerCheckpointError: the checkpoint is damaged. OSError: no room or no permission.
    """
    from async_rl.controller.checkpoints import hold

    config = _trainer_config(directory)
    checkpoint = checkpoint_of(directory, step)
    out = out or directory / "export" / checkpoint.name
    if out.exists():
        raise ValueError(f"--out is {out}, which exists; remove it or give another folder")
    with hold(checkpoint):
        _export(checkpoint / "trainer", out, like=directory / "model", config=config)
    return out


def _export(checkpoint: Path, out: Path, *, like: Path, config: TrainerConfig) -> None:
    from async_rl.trainer.distributed import ProcessGroups
    from async_rl.trainer.export import adapter_folder, export_adapter, save_on_first_rank
    from async_rl.trainer.model.convert import load_weights
    from async_rl.trainer.model.gpt import build_model
    from async_rl.trainer.model.source import WeightSource
    from async_rl.trainer.state.checkpoint import fields_of, load_state, read_manifest, start_of  # imports megatron
    from async_rl.trainer.state.shards import copy_into, live_tensors, model_shards
    from async_rl.weights.pretrained import save_pretrained

    groups = ProcessGroups(config, rank=0, world_size=1, rendezvous=None)
    try:
        model = build_model(like, config=config, device=groups.device)
        start = like
        if config.lora.rank:
            start = start_of(checkpoint) or like
            load_weights(model.chunks, start, shape=model.shape)
        read_manifest(checkpoint, model=fields_of(model.shape, config=config, start=start), ranks=groups)
        shards = model_shards(model.chunks, lora=config.lora.rank > 0)
        weights = live_tensors(shards)
        copy_into(weights, load_state(checkpoint, {"model": shards})["model"])
        save_on_first_rank(WeightSource(model.chunks, shape=model.shape), partial(save_pretrained, out, like=like))
        if config.lora.rank:
            export_adapter(model, adapter_folder(out), config=config.lora, start=start)
    finally:
        groups.close()


def _trainer_config(directory: Path) -> TrainerConfig:
    """That of the run, for one rank on any device."""
    for name in ("config.yaml", "model"):
        if not (directory / name).exists():
            raise ValueError(f"{directory} has no {name}; give the output_dir of a run that was started")
    try:
        values: dict[str, Any] = yaml.safe_load((directory / "config.yaml").read_text())["trainer"]
        config = TypeAdapter(TrainerConfig).validate_python(values)
    except (yaml.YAMLError, KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"{directory / 'config.yaml'} is not the config of a run: {error}") from error
    return replace(
        config,
        ranks=1,
        parallel=ParallelConfig(),
        distributed_optimizer=False,
        layer_spec="local",
        router_replay="none",
        replay_threshold=0.0,
    )


def checkpoint_of(directory: Path, step: int | None) -> Path:
    """The folder of the checkpoint of one step of a run, or of the newest.

    Raises:
        ValueError: there is none; names those that there are.
    """
    from async_rl.config import CheckpointConfig
    from async_rl.controller.checkpoints import Checkpoints

    checkpoints = directory / "checkpoints"
    steps = Checkpoints(checkpoints, config=CheckpointConfig()).steps()
    if step is None and steps:
        return steps[max(steps)]
    if step is None or step not in steps:
        asked = "" if step is None else f" of step {step} (--step)"
        there = f"there are steps {', '.join(map(str, sorted(steps)))}" if steps else "it has saved none yet"
        raise ValueError(f"{checkpoints} has no whole checkpoint{asked}; {there}")
    return steps[step]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog("export"), description="Make a Hugging Face checkpoint from a checkpoint of a run."
    )
    parser.add_argument("directory", type=Path, help="output_dir of the run")
    parser.add_argument("--step", type=int, default=None, help="train step of the checkpoint, default: the newest")
    parser.add_argument("--out", type=Path, default=None, help="new folder, default: DIRECTORY/export/step-NNNNNN")
    return parser.parse_args(argv)
