"""Run directories with a hand-written trace."""

import json

import yaml

A, B = 0.01, 0.0005  # seconds of a decode step, and per request
CONFIG = {
    "engine": {"replicas": 1, "max_num_seqs": 256},
    "trainer": {"ranks": 1, "updates_per_batch": 1, "parallel": {"tensor": 1, "pipeline": 1, "context": 1}},
    "staleness": {"max_staleness": 1, "policy": "wait", "max_requeues": 3},
    "rollout": {"groups_per_batch": 1, "trajectories_per_group": 1, "on_update": "resume", "kv": "recompute"},
    "sync": {"mode": "at_once", "max_paused": 1},
    "checkpoint": {"every": 1},
}


def span(kind, start, end, *, process="controller", **args):
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "name": kind, "cat": kind, "pid": process, "tid": "0", "args": args} | times


def generate(start, end, *, tokens, group=1, trajectory=0, replica="replica-0", aborted=False):
    place = {"group": group, "trajectory": trajectory, "replica": replica}
    return span("generate", start, end, process="worker-0", tokens=tokens, aborted=aborted, **place)


def background():
    """Group 0: 1 to 6 requests at a time, of 1,000 tokens each, at exactly A + B n; ends before 80 s."""
    spans, at = [], 0.0
    for requests in range(1, 7):
        end = at + 1000 * (A + B * requests)
        spans += [generate(at, end, tokens=1000, group=0, trajectory=n) for n in range(requests)]
        at = end
    return [span("rollout", 0, at, group=0), *spans]


def write_run(directory, events, *, config=None, ledger=(), schedule=(), metrics=None, cut=0):
    """Write a run; `cut` characters are missing at the end of its trace."""
    metrics = [{"train_step": 1, "step/seconds": 15, "idle/trainer": 0.6}] if metrics is None else metrics
    (directory / "config.yaml").write_text(yaml.safe_dump(CONFIG | (config or {})))
    trace = "[\n" + "".join(json.dumps(event) + ",\n" for event in events)
    (directory / "trace.json").write_text(trace[: len(trace) - cut])
    for name, lines in (("metrics", metrics), ("ledger", ledger), ("schedule", schedule)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory
