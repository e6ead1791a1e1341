"""The real thing: `python -m async_rl.run` with real Ray, vLLM and megatron-core on a tiny MoE."""

import json
import os
import shlex
import signal

import numpy as np
import pytest
from transformers import AutoTokenizer, GenerationConfig

from async_rl.export import main
from async_rl.metrics.trace import read_trace
from tests.e2e.runs import (
    check_records,
    check_rollouts,
    complete,
    finish,
    k3_bound,
    lines,
    pids,
    spawn,
    start,
    wait_for_step,
)
from tests.helpers.lanes import WHOLE_RUN
from tests.helpers.traces import CHAIN, check_trace
from tests.helpers.updates import checkpoint_digest

pytestmark = pytest.mark.timeout(1000)
SHORT = ("staleness.max_staleness=1",)
GREEDY = ("validation.samples=2", "validation.sampling.temperature=0")


@pytest.fixture(scope="module")
def warm_starts(tmp_path_factory):
    """Warm-started checkpoints, shared by the runs of this module."""
    return tmp_path_factory.mktemp("warm_start")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory, warm_starts):
    """Directory of a run of 4 steps that ended by itself."""
    directory = tmp_path_factory.mktemp("short_run")
    output = complete(directory, warm_starts, *SHORT, *GREEDY, "total_train_steps=4")
    (directory / "console.txt").write_text(output)
    return directory


@pytest.mark.numerics
def test_a_short_run_keeps_every_promise_of_its_metrics(short_run, warm_starts):
    steps, _ = check_records(short_run, steps=4, staleness=1, k3=k3_bound(warm_starts), trained=16)
    assert all(step["throughput/train_tflops"] > 0 and "throughput/mfu" not in step for step in steps)
    assert [s["param_version"] for s in steps] == [1, 2, 3, 4]
    assert all(s["mismatch/k3_probe"] is not None for s in steps)
    assert steps[0]["mismatch/k3_lag0"] is not None, "the first batch is sampled by the weights it trains"
    assert steps[0]["routing/overlap"] > 0.9999
    rounds = lines(short_run, "validation.jsonl")
    assert [v["train_step"] for v in rounds] == [0, 4]
    assert all(v["validation/pass_at_1"] == v["validation/pass_at_2"] for v in rounds), "both samples are greedy"
    files = ("config.yaml", "trace.json", "report.html", "rollouts.html", "starts.jsonl", "tensorboard")
    for name in (*files, "checkpoints/step-000004/run.json"):
        assert (short_run / name).exists(), name


def test_trace_follows_each_trained_group_through_every_process(short_run):
    groups = [group["group"] for group in lines(short_run, "ledger.jsonl")[:-1] if group["outcome"] == "trained"]
    kinds = check_trace(short_run, trained=groups)
    assert kinds["controller"] >= {*CHAIN, "wait", "export", "checkpoint", "validate"} - {"trajectory"}
    assert kinds["worker-0"] >= {"trajectory", "generate", "reward", "validation"}
    assert kinds["replica-0"] == {"fetch", "pause", "abort", "load"}
    assert kinds["trainer-0"] >= {"fetch", "build", "forward_backward", "optimizer", "record", "export", "checkpoint"}


def test_rollouts_on_disk_are_those_that_were_sampled_and_trained(short_run):
    steps, groups = check_records(short_run, steps=4, staleness=1)
    files = check_rollouts(short_run, steps, groups)
    tokenizer = AutoTokenizer.from_pretrained(short_run / "final")
    for line in lines(short_run, "schedule.jsonl"):
        rows = {(row["group"], row["trajectory"]): row for row in files[line["train_step"]]}
        for group in line["groups"]:
            for number, spans in enumerate(group["spans"]):
                row = rows[group["group"], number]
                counts = {}
                for segment in row["segments"]:
                    update = line["train_step"] - 1 - segment["staleness"]
                    counts[update] = counts.get(update, 0) + segment["tokens"]
                assert counts == dict(spans)
                text = row["prompt"] + "".join(turn["text"] + turn["reply"] for turn in row["turns"])
                assert text == tokenizer.decode(row["token_ids"], skip_special_tokens=False)
                experts = np.array(row["routed_experts"])
                assert len(experts) == len(row["token_ids"]) and (experts[:-1] >= 0).all() and (experts[-1] == -1).all()


def test_logs_hold_the_output_of_every_process(short_run):
    processes = pids(short_run)
    assert set(processes) == {"trainer-0", "replica-0", "worker-0", "queue"}
    named = {"driver.log", *(f"{name}.log" for name in processes)}
    assert {path.name for path in (short_run / "logs").iterdir()} == named
    for name, pid in processes.items():
        assert f"process {pid} started" in (short_run / "logs" / f"{name}.log").read_text()
    assert "(EngineCore pid=" in (short_run / "logs" / "replica-0.log").read_text()
    log = (short_run / "logs" / "driver.log").read_text().splitlines()
    log = [line.split(" ", 3)[3] for line in log]  # without date, time and level
    assert len([line for line in log if line.startswith("step ")]) == 4
    assert set(log) <= set((short_run / "console.txt").read_text().splitlines())
    assert log[-1].startswith("done: ") and str(short_run / "final") in log[-1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of megatron
def test_final_and_export_hold_the_tensors_of_the_last_version(short_run, tmp_path, capsys):
    published = [event["args"] for event in read_trace(short_run / "trace.json") if event["cat"] == "publish"]
    assert published[-1]["version"] == 4 and published[-1]["digest"] == checkpoint_digest(short_run / "final")
    assert main([str(short_run), "--step", "4", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    for path in (short_run / "final").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert json.loads((short_run / "final" / "config.json").read_text())["dtype"] == "float32"
    eos = AutoTokenizer.from_pretrained(short_run / "final").eos_token_id
    assert GenerationConfig.from_pretrained(short_run / "final").eos_token_id == eos


@WHOLE_RUN
def test_a_run_keeps_to_the_schedule_of_another_run(tmp_path, warm_starts, short_run):
    options = (*SHORT, "validation.prompts=0", f"schedule={short_run}")
    complete(tmp_path / "second", warm_starts, *options, "total_train_steps=4", "loss=ppo_clip")
    plans = [lines(short_run, "schedule.jsonl"), lines(tmp_path / "second", "metrics.jsonl")]
    groups = sorted((g for line in plans[0] for g in line["groups"]), key=lambda g: g["group"])
    trained = [g for g in lines(tmp_path / "second", "ledger.jsonl") if g["outcome"] == "trained"]
    versions = [g["admitted_version"] for g in sorted(trained, key=lambda g: g["group"])]
    assert versions == [g["admitted_update"] for g in groups]
    for line, step in zip(*plans, strict=True):
        oldest = min(spans[0][0] for group in line["groups"] for spans in group["spans"])
        assert step["staleness/max"] == line["train_step"] - 1 - oldest
        assert step["ledger/error"] == 0

    output = complete(tmp_path / "third", warm_starts, *options, "rollout.groups_per_batch=2", code=2)
    assert "rollout.groups_per_batch" in output


@WHOLE_RUN
def test_an_interrupted_run_resumes_by_its_printed_command_until_a_failure(tmp_path, warm_starts):
    process = start(tmp_path, warm_starts, "total_train_steps=200")
    wait_for_step(tmp_path, 2, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
    output = finish(process)
    printed = shlex.split(output.splitlines()[-1].partition("continue with: ")[2])
    done = len(lines(tmp_path, "metrics.jsonl"))
    check_records(tmp_path, steps=done, staleness=1)

    process = spawn([*printed, "total_train_steps=500", "supervision.max_restarts=0"])
    wait_for_step(tmp_path, done + 2, process)
    os.kill(pids(tmp_path)["trainer-0"], signal.SIGKILL)
    output = finish(process, code=1)  # long before cluster.call_timeout_s
    assert "total_train_steps: 200 -> 500" in output, output
    last = output.splitlines()
    assert any(line.startswith("error: stage") and "trainer rank 0" in line for line in last[-4:]), output
    assert f"the end of {tmp_path}/logs/trainer-0.log:" in last
    assert (tmp_path / "logs" / "driver.log").read_text().splitlines()[-1] == last[-1]
    steps = [s["train_step"] for s in lines(tmp_path, "metrics.jsonl")]
    assert len(steps) > done
    assert steps == list(range(1, len(steps) + 1))
