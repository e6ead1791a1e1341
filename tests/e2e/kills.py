"""The default run on two replicas and two rollout workers under kill -9: `python -m tests.e2e.kills`, or `make kills`.

At random moments a process is killed: everything, the driver, the queue, a replica, a rollout worker, or the trainer.
If the driver died, the same command is repeated. Before each kill everything stands still and the journal is read.
Exit status 1 if a promise is broken.

--kills N       how many, 20 without it       --within S      a kill comes up to so many seconds, 25 without it, after
                                              the next train step, and one in four up to so many after the last kill
--seed N        of moments and victims        --out FOLDER    run directory and report, outputs/kills without it
--against DIR…  undisturbed runs, whose held-out success is printed next to this one's
"""

import argparse
import json
import random
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from async_rl.config import load_config
from tests.e2e.runs import begin, begins_with, check_prompts, check_records, each, lines, peek, tree_of

ALWAYS = ("checkpoint.every=5", "supervision.max_restarts=1000", "engine.replicas=2", "rollout.workers=2")
VICTIMS = {"everything": 5, "driver": 3, "queue": 3, "replica": 3, "worker": 3, "trainer": 3}
LOSE_DECODES = ("everything", "driver", "queue", "replica", "worker")
END_S = 1800.0


@dataclass(kw_only=True)
class Kill:
    victim: str
    """The killed part."""
    at_step: int
    """Train steps recorded at the kill."""
    tokens: int = 0
    """Sampled tokens in the journal."""
    decodes: int = 0
    """Trajectories under way, whose tokens since their last segment end with the victim; 0 if the journal has not
    changed since the last kill."""


@dataclass(kw_only=True)
class Witness:
    """Contents of the journal of a run, from one kill to the next."""

    prompts: dict[int, int] = field(default_factory=dict)
    held: dict[int, object] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    compared: int = 0
    lengths: dict[int, list[int]] = field(default_factory=dict)
    advanced: bool = False

    def see(self, recovered, content):
        """Compare with the contents before: no prompt twice, and written content remains."""
        for admission in (*recovered.open, *recovered.ready):
            group, prompt = admission.group, admission.prompt
            if self.prompts.setdefault(group, prompt) != prompt:
                self.broken.append(f"group {group} had prompt {self.prompts[group]} and has {prompt}")
            if group in self.held:
                self.compared += 1
                pairs = zip(content[group].trajectories, self.held[group].trajectories, strict=True)
                if not all(begins_with(found, held) for found, held in pairs):
                    self.broken.append(f"group {group} does not begin with what the journal held before")
        lengths = {group: [len(t) for t in held.trajectories] for group, held in content.items()}
        self.advanced, self.lengths = lengths != self.lengths, lengths
        self.held = content
        self.tokens |= {group: held.num_tokens for group, held in content.items()}


def main(arguments=None):
    options = _parse(arguments)
    chance = random.Random(options.seed)
    directory = options.out / "run"
    if directory.exists():
        raise SystemExit(f"--out is {options.out}, which holds a run; remove it or give another")
    directory.mkdir(parents=True)
    overrides = (*ALWAYS, *options.overrides)
    config = load_config([f"output_dir={directory}", *overrides])
    witness = Witness()
    kills, code = _live(directory, config, overrides, witness, chance, options)
    broken = [*witness.broken, *(_broken(directory, config, witness) if code == 0 else [f"exit code {code}"])]
    _report(directory, kills, witness, broken, options.against)
    return 1 if broken else 0


def _live(directory, config, overrides, witness, chance, options):
    """Run to the end with kills on the way: (kills, exit code)."""
    kills = []
    with (options.out / "output.log").open("w") as output:
        process = begin(directory, *overrides, output=output)
        try:
            while len(kills) < options.kills:
                if chance.random() < 0.75:
                    _ended(process, within_s=END_S, directory=directory, step=_steps(directory) + 1)
                if _ended(process, within_s=chance.uniform(0, options.within)):
                    break
                kill = _kill(process, directory, config, witness, chance, options.out / "copy")
                kills.append(kill)
                _say(f"{len(kills)}: {kill}")
                if kill.victim in ("everything", "driver"):
                    process.wait()
                    process = begin(directory, *overrides, output=output)
            _ended(process, within_s=END_S)
            return kills, process.poll()
        finally:
            if process.poll() is None:
                each(tree_of(process), psutil.Process.kill)


def _ended(process, *, within_s, directory=None, step=None):
    """Wait for the end of the process, or for a train step to be recorded; whether it ended."""
    deadline = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < deadline and (step is None or _steps(directory) < step):
        time.sleep(0.1)
    return process.poll() is not None


def _steps(directory):
    """Train steps that are recorded."""
    metrics = directory / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def _kill(process, directory, config, witness, chance, copy):
    """Suspend all processes, look, and kill one part; the others continue."""
    tree = tree_of(process)
    each(tree, psutil.Process.suspend)
    victim = chance.choices(list(VICTIMS), weights=list(VICTIMS.values()))[0]
    parts = directory / "processes.json"
    pids = json.loads(parts.read_text()) if parts.exists() else {}
    of_victim = [one for one in tree if one.pid in {pid for name, pid in pids.items() if name.startswith(victim)}]
    if victim not in ("everything", "driver") and not of_victim:
        victim = "driver"  # the part was not there yet
    kill = Kill(victim=victim, at_step=_steps(directory))
    seen = peek(directory, copy, config=config, warm_starts=config.warm_start.cache)
    if seen:
        recovered, content = seen
        witness.see(recovered, content)
        kill.tokens = sum(group.num_tokens for group in content.values())
        if victim in LOSE_DECODES and witness.advanced:
            under_way = [content[admission.group] for admission in recovered.open]
            kill.decodes = sum(len(t) > 0 and not t.closed for group in under_way for t in group.trajectories)
    if victim == "everything":
        each(tree, psutil.Process.kill)
    else:
        each(of_victim or tree[:1], psutil.Process.kill)
        each(tree, psutil.Process.resume)
    return kill


def _broken(directory, config, witness):
    """Promises that a run did not keep."""
    steps, trained = config.total_train_steps, config.total_train_steps * config.rollout.groups_per_batch
    try:
        _, groups = check_records(
            directory, steps=steps, staleness=config.staleness.max_staleness, trained=trained, dropped=0
        )
        check_prompts(directory, step=steps)
        assert len(set(witness.prompts.values())) == len(witness.prompts), "no prompt is repeated"
        for line in groups:
            if line["outcome"] == "trained":
                assert line["tokens"] >= witness.tokens.get(line["group"], 0), "no group lost tokens of the journal"
    except AssertionError:
        return [traceback.format_exc()]
    return []


def _report(directory, kills, witness, broken, against):
    ledger = [line for line in lines(directory, "ledger.jsonl") if line.get("outcome") == "trained"]
    tokens, segments = sum(line["tokens"] for line in ledger), sum(line["segments"] for line in ledger)
    decode = tokens / max(1, segments)
    lost = sum(kill.decodes for kill in kills) * decode / 2
    counts = {victim: sum(kill.victim == victim for kill in kills) for victim in VICTIMS}
    _say(f"kills: {len(kills)}, " + ", ".join(f"{victim} {n}" for victim, n in counts.items()))
    _say(f"groups compared with an earlier journal: {witness.compared}")
    _say(
        f"tokens trained: {tokens}; lost with decodes under way: about {lost:.0f} "
        f"({sum(kill.decodes for kill in kills)} decodes, half of the mean {decode:.1f} tokens each)"
    )
    for run in (directory, *against):
        found = ", ".join(f"{v['train_step']}: {v['validation/success']:.3f}" for v in lines(run, "validation.jsonl"))
        _say(f"held-out success of {run}: {found}")
    _say("\n".join(f"BROKEN: {promise}" for promise in broken) or "every promise was kept")


def _parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--within", type=float, default=25.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/kills"))
    parser.add_argument("--against", type=Path, nargs="*", default=())
    parser.add_argument("overrides", nargs="*", help="for instance total_train_steps=20")
    return parser.parse_args(arguments)


def _say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
