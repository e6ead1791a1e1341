"""The command line: exit codes, and how a failure reads."""

import gc
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import ray
import torch
import yaml
from safetensors.torch import load_file, save_file

from async_rl.config import CONFIGS, RECIPES, ConfigError, build_config, load_config, recipe_overrides
from async_rl.run import EXIT_REFUSED, _parse, causes, hydra_value, log_ends, main, resume_command
from async_rl.trainer.model.families import read_shape
from async_rl.trainer.model.families.weights import expected_weights
from message_queue.journal import FORMAT, EventJournal, JournalConfig
from message_queue.state import StoredState
from recipes.calculator.model import TinyModelConfig, save_initial_checkpoint
from recipes.calculator.tokenizer import build_tokenizer
from tests.helpers.tiny_models import quantize_fp8

TASKS = """
from async_rl import Task

def exact(completion, answer):
    return completion.text == answer

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
task = Task(prompts=ROWS, rewards=exact, validation=0.25, end_of_turn="<|im_end|>")
no_held_out = Task(prompts=ROWS, rewards=exact, end_of_turn="<|im_end|>")

def of_text(text):
    return Task(prompts=[text + 1], rewards=exact)

class Half(Task):
    def __init__(self, seed):
        pass

    def train_prompt(self, index):
        return index

from agent_loop import math_answer

def tool(*numbers: int):
    "Adds."
"""
PROMPT = '{"messages": [{"role": "user", "content": "1="}], '
FILES = {  # in the working directory
    "mine.py": TASKS,
    "broken.py": "x = 1\nx = 1 / 0\n",
    "object.json": "{}",
    "rows.parquet": "PAR1\xff\xfe",
    "no_target.jsonl": f'{PROMPT}"target": {{"answer": "1"}}}}\n{PROMPT}"answer": "2"}}\n',
    "number.jsonl": f'{PROMPT}"target": {{"answer": "1"}}}}\n{PROMPT}"target": {{"answer": 2}}}}\n',
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A complete checkpoint of a Qwen3-MoE with 2 key-value heads, 8 experts and 117 token ids."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_initial_checkpoint(folder, tokenizer=build_tokenizer(), seed=0, config=TinyModelConfig())
    return folder


def with_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def without(*names):
    def change(folder):
        for name in names:
            (folder / name).unlink()

    return change


def as_olmoe(folder):
    with_config(model_type="olmoe", norm_topk_prob=False, rms_norm_eps=1e-5, mlp_only_layers=[])(folder)
    names = expected_weights(read_shape(folder))
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")


def with_a_prediction_layer(folder):
    found = load_file(folder / "model.safetensors")
    found["model.layers.4.eh_proj"] = found["model.norm.weight"].clone()
    save_file(found, folder / "model.safetensors")


def without_scales(folder):
    quantize_fp8(folder)
    (folder / "model-2.safetensors").write_bytes((folder / "model-1.safetensors").read_bytes())


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without_template(folder):
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    fields.pop("chat_template", None)
    path.write_text(json.dumps(fields))
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def with_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')


BAD_CALLS = [  # arguments of Task, parts of the line
    ("prompts=ROWS, rewards=exact, template='{prompt'", "template is '{prompt'"),
    ("prompts=ROWS, rewards=exact, template='{prompt.x}'", "template is '{prompt.x}'", "prompt, answer"),
    ("prompts=ROWS, rewards=exact, template='{}'", "template is '{}'", "{name}"),
    ("prompts=ROWS, rewards=None", "rewards is None", "give a function"),
    ("prompts=ROWS, rewards='exact'", "rewards is 'exact'", "give a function"),
    ("prompts=ROWS, rewards=math_answer", "reward math_answer", "call it"),
    ("prompts=ROWS, rewards=exact, tools=tool", "tools is", "give a list"),
    ("prompts=ROWS, rewards=exact, tools=['tool']", "tool 'tool'", "function"),
    ("prompts=ROWS, rewards=exact, tools=[tool]", "tool tool", "*numbers"),
    ("prompts=lambda: ROWS, rewards=exact", "prompts", "returns a list"),
    ("prompts='object.json', rewards=exact", "object.json", "list of rows"),
    ("prompts=ROWS, rewards=exact, max_prompt_tokens='7'", "max_prompt_tokens is '7'"),
    ("prompts=ROWS, rewards=exact, system=7", "system is 7"),
    ("prompts=exit(3), rewards=exact", "SystemExit: 3", "bad_call.py:26"),
]
OWN = "--task mine.py validation.prompts=1"
BAD_OVERRIDES = [  # arguments, parts of the line
    ("name={a", "'name={a'", "quote"),
    ("nonsense", "nonsense", "key=value"),
    ("wish=1", "wish", "known here: name"),
    ("trainer.thread=2", "trainer.thread ", "trainer.threads"),
    ("max_staleness=2", "max_staleness ", "staleness.max_staleness"),
    ("engine=vlm", "engine is 'vlm'", "engine=vllm"),
    ("seed=0,1", "seed=0,1", "for value in 0 1; do", "seed=$value"),
    ("rollout.workers=few", "rollout.workers is 'few'", "integer"),
    ("--config-dir nowhere", "nowhere"),
    ("--config-name absent", "absent"),
    ("--recipe absent", "--recipe", "absent", "agents, calculator, first_model, long_tail, math, openenv"),
    ("resume=/nowhere", "resume is /nowhere", "auto"),
    ("schedule=/nowhere", "schedule is /nowhere", "schedule.jsonl"),
    ("output_dir=mine.py/run", "output_dir", "mine.py/run", "another"),
    ("rollout.limits.max_tokens=100000", "max_tokens is 100000", "engine.max_model_len=256"),
    ("rollout.limits.max_new_tokens_per_turn=224", "max_new_tokens_per_turn is 224", "max_tokens=224"),
    ("engine=sglang engine.python=/nowhere task.options.dense_first_layer=false", "/nowhere", "make setup"),
    ("engine=sglang engine.python=/bin/true", "mlp_only_layers=[0]", "engine=vllm"),
    ("engine.max_model_len=2048", "engine.max_model_len is 2048", "1024", "lower it"),
    ("engine.kv_cache_bytes=1000", "engine.kv_cache_bytes is 1000", "engine.max_model_len=256"),
    ("trainer.ranks=5 trainer.parallel.pipeline=5", "pipeline x virtual_pipeline is 5", "4 layers"),
]
BAD_TASKS = [
    ("task.prompt_file=/nowhere/prompts.jsonl", "task.prompt_file is /nowhere/prompts.jsonl", "No such file"),
    ("task.prompt_file=rows.parquet", "task.prompt_file is", "rows.parquet", "Task(prompts="),
    ("task.prompt_file=no_target.jsonl", "task.prompt_file", "line 2", "answer"),
    ("task.prompt_file=number.jsonl", "task.prompt_file", "line 2", "target.answer"),
    ("task.options.min_operand=-5", "task.options.min_operand is -5"),
    ("task.options.max_operand=hello", "task.options.max_operand is 'hello'"),
    ("task.options.wish=1", "task.options.wish", "max_operand"),
    ("task.factory=nowhere:Task", "task.factory is 'nowhere:Task'", "nowhere"),
    ("--task broken.py", "broken.py:2", "ZeroDivisionError"),
    ("--task mine.py:of_text", "task.options.text is missing"),
    (f"{OWN} task.options.rows=2", "task.options is {'rows': 2}", "mine.py:task", "function"),
    ("--task mine.py:Half", "Half does not define build_loop", "Task.__init__"),
]
BAD_MODELS = [  # change of the model, arguments, parts of the line
    (with_config(model_type="gpt2"), "", "model_type 'gpt2'", "qwen3_moe"),
    (with_config(use_sliding_window=True), "", "use_sliding_window=True", "whole sequence"),
    (with_config(quantization_config={"quant_method": "awq"}), "", "quantization_config='awq'", "bfloat16"),
    (with_config(quantization_config={"quant_method": "fp8"}), "", "weight_block_size=None", "bfloat16"),
    (without_scales, "", "proj.weight is F8_E4M3", "without scales"),
    (without("config.json"), "", "config.json", "give a Hugging Face checkpoint folder"),
    (without("tokenizer.json", "tokenizer_config.json"), "", "has no tokenizer", "tokenizer.json"),
    (without_template, "", "no chat template", "chat_template.jinja"),
    (with_config(vocab_size=100), "", "ids up to 116", "vocab_size=100"),
    (without("model.safetensors"), "", "no *.safetensors file", "save_pretrained"),
    (with_index, "", "lacks model-1.safetensors", "copy"),
    (cut_short, "", "model.safetensors cannot be read", "copy it again"),
    (with_config(num_hidden_layers=5), "", "model.layers.4", "copy"),
    (with_a_prediction_layer, "", "layers.4.eh_proj"),
    (None, "trainer.ranks=8 trainer.parallel.tensor=8", "trainer.parallel.tensor is 8", "4 attention heads"),
    (None, "trainer.ranks=3 trainer.parallel.expert=3", "trainer.parallel.expert is 3", "8 experts"),
    (as_olmoe, "engine=sglang engine.python=/bin/true", "'sglang', which does not run olmoe", "engine=vllm"),
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(place, capsys):
    """Gives the error lines of a run that is refused before any process starts."""

    def run(arguments):
        in_run = [] if "output_dir" in arguments else ["output_dir=run"]
        assert main([*in_run, *arguments.split()]) == EXIT_REFUSED
        assert not ray.is_initialized() and not (place / "run").exists()
        shown = capsys.readouterr()
        lines = shown.err.splitlines()
        assert not shown.out and all(line.startswith("error: ") for line in lines), shown
        return lines

    return run


@pytest.mark.parametrize("case", BAD_OVERRIDES + BAD_TASKS, ids=lambda case: case[0][:60])
def test_bad_input_is_refused_with_one_line_and_no_process(case, model, refused):
    given, *parts = case
    (line,) = refused(f"{given} model.checkpoint={model}" if "--task" in given else given)
    assert [part for part in parts if part not in line] == [], line


@pytest.mark.parametrize("case", BAD_CALLS, ids=lambda case: case[0])
def test_a_bad_task_is_refused_with_one_line_and_no_process(case, model, place, refused):
    call, *parts = case
    (place / "bad_call.py").write_text(f"{TASKS}\nbad = Task({call})\n")
    (line,) = refused(f"--task bad_call.py:bad model.checkpoint={model} validation.prompts=0 --check")
    assert [part for part in parts if part not in line] == [], line


@pytest.mark.parametrize("case", BAD_MODELS, ids=lambda case: case[2][:40])
def test_a_bad_model_is_refused_with_one_line_and_no_process(case, model, place, refused):
    change, given, *parts = case
    folder = shutil.copytree(model, place / "model")
    if change is not None:
        change(folder)
    (line,) = refused(f"{OWN} model.checkpoint=model rollout.groups_per_batch=12 {given}")
    assert [part for part in parts if part not in line] == [], line


def test_all_problems_of_model_task_and_layout_are_shown_together(model, place, refused):
    without_template(shutil.copytree(model, place / "model"))
    layout = "trainer.ranks=8 trainer.parallel.tensor=8 engine.tensor_parallel=8"
    found = refused(f"--task mine.py:no_held_out model.checkpoint=model {layout}")
    parts = ("trainer.parallel.tensor", "engine.tensor_parallel", "chat template")
    assert len(found) == len(parts) and all(any(part in line for line in found) for part in parts), found


@pytest.mark.parametrize("change", [None, quantize_fp8])
def test_the_check_of_a_run_prints_a_summary_and_leaves_nothing(change, model, place, capsys):
    folder = shutil.copytree(model, place / "model")
    if change is not None:
        change(folder)  # its plain weights are counted
    before = {*place.iterdir()}
    assert main(["--check", *OWN.split(), "model.checkpoint=model", "output_dir=run", "trainer.ranks=2"]) == 0
    shown = capsys.readouterr().out
    for part in ("qwen3_moe, 919,168 parameters, 4 layers, 8 experts, top 2", "2 ranks = data 2", "vllm, 1 replicas"):
        assert part in shown
    memory = re.search(r"(?s)a trainer rank holds (\S+) GiB .* rank holds (\S+) GiB = .* take (\S+) GiB", shown)
    weights, kv = 919_168 / 2**30, 128 * 1024 * 4 * 2 * 2 * 32 * 4 / 2**30
    assert [float(value) for value in memory.groups()] == pytest.approx([20 * weights, 4 * weights, kv], rel=0.01)
    assert not ray.is_initialized() and {*place.iterdir()} == before


def test_the_loop_for_several_values_starts_a_run_for_each(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(["seed=0,1"])
    loop = str(caught.value).partition("each value: ")[2].replace("python -m async_rl.run", "echo")
    shown = subprocess.run(["bash", "-c", loop], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [load_config(line.split()).seed for line in shown] == [0, 1]


def test_help_names_the_presets_and_the_ways_to_look_first(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for part in ("--show", "--check", "engine=", "sglang | vllm", "staleness=", "task.options."):
        assert part in shown


def test_a_folder_of_configs_may_be_given_relative_to_the_current_one(tmp_path, monkeypatch, capsys):
    shutil.copytree(CONFIGS, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert main(["--show", "--config-dir", "mine", "seed=4"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["seed"] == 4


@pytest.mark.parametrize(
    ("run", "format_number", "checksum", "named"),
    [
        ("other seed 0", FORMAT, "checksum", ["'other seed 0'"]),
        ("calculator seed 0", 99, "checksum", ["format 99"]),
        ("calculator seed 0", FORMAT, "checksum + 1", ["events.sqlite", "remove the directory"]),
    ],
    ids=["run", "format", "damage"],
)
def test_a_run_refuses_a_journal_that_it_cannot_continue(
    capsys, tmp_path, monkeypatch, run, format_number, checksum, named
):
    monkeypatch.setattr("message_queue.journal.FORMAT", format_number)
    journal = EventJournal(tmp_path / "journal", run=run, settings={}, config=JournalConfig())
    journal._write([StoredState()])
    journal._connection.execute(f"UPDATE state SET checksum = {checksum}")
    journal._connection.commit()
    journal.release()
    monkeypatch.undo()
    assert main([f"output_dir={tmp_path}"]) == EXIT_REFUSED
    error = " ".join(capsys.readouterr().err.split())
    assert all(name in error for name in named)


@pytest.mark.parametrize(
    "given",
    [
        ["total_train_steps=200", "loss=ppo_clip", "optimizer.lr=1e-4", "resume=never"],
        ["--recipe", "long_tail", "+task.options.steps=[2, 3]", "task.prompt_file='/tmp/a b,c.jsonl'"],
        ["--config-name", "other", "--config-dir", "OTHER", "name=try", "output_dir=outputs/${name}"],
    ],
)
@pytest.mark.parametrize("folder", ["outputs/x", "of a person/it's, {x}: $y=1", r"back\slash", "12"])
def test_the_resume_command_gives_the_config_of_the_run(given, folder, tmp_path):
    other = shutil.copytree(CONFIGS, tmp_path / "other configs")
    (other / "other.yaml").write_text((CONFIGS / "run.yaml").read_text() + "\nseed: 7\n")
    given = [str(other) if word == "OTHER" else word for word in given]
    if not any(word.startswith("output_dir=") for word in given):
        given = [*given, "output_dir=" + hydra_value(str(tmp_path / folder))]
    arguments = _parse(given)
    config = config_of(arguments)
    again = shlex.split(resume_command(arguments, output_dir=config.output_dir))
    assert again[:3] == [sys.executable, "-m", "async_rl.run"]
    for own in ("output_dir=", "resume="):
        assert sum(word.startswith(own) for word in again) == 1
    assert config_of(_parse(again[3:])) == replace(config, resume="auto")


@pytest.mark.parametrize(
    "text", ["12", "null", "a", "a b", "it's", r"\\'", "$HOME/${x}", "[a, b]", "{a: b}", "", "/a\\"]
)
def test_a_quoted_value_of_an_override_is_the_text_itself(text):
    assert load_config([f"name={hydra_value(text)}"]).name == text


def config_of(arguments):
    recipe = recipe_overrides(RECIPES / arguments.recipe / "recipe.yaml") if arguments.recipe else []
    options = {"config_name": arguments.config_name, "config_dir": arguments.config_dir or CONFIGS}
    return load_config([*recipe, *arguments.overrides], **options)


REFUSED = """
import sys

from async_rl.run import main

print(main(["rollout.wokers=2"]), sorted({"torch", "megatron", "vllm", "ray", "transformers"} & sys.modules.keys()))
"""


def test_a_misspelt_override_is_refused_without_torch():
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True)
    assert done.stdout == f"{EXIT_REFUSED} []\n"
    assert "rollout.wokers" in done.stderr and "rollout.workers" in done.stderr


def test_show_prints_all_values_of_a_run_without_starting_it(capsys, tmp_path):
    assert main(["--show", f"output_dir={tmp_path / 'run'}", "rollout.workers=2"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert build_config(values) == load_config([f"output_dir={tmp_path / 'run'}", "rollout.workers=2"])
    assert not (tmp_path / "run").exists()


SECRETS = (
    "endpoint.run_key=s3cr3t",
    "++cluster.rank_env.WHATEVER=s3cr3t",
    "cluster.replica_env={HF_TOKEN: s3cr3t}",
    "sync.directory='s3://AKEY:s3cr3t@bucket/x'",
    "+task.options.api_key=s3cr3t",
)


def test_secrets_are_not_shown(capsys, tmp_path):
    given = [f"output_dir={tmp_path / 'run'}", "sync.route=folder", *SECRETS, "task.options.hf_token='${oc.env:HOME}'"]
    command = resume_command(_parse(given), output_dir=tmp_path / "run")
    assert "s3cr3t" not in command and "${oc.env:HOME}" in command and "sync.route=folder" in command
    assert main(["--show", *given]) == 0
    shown = capsys.readouterr().out
    assert "s3cr3t" not in shown and "bucket/x" in shown and "WHATEVER" in shown
    assert main(["--check", *given, "nonsense.key=s3cr3t", "endpoint.host=''"]) == EXIT_REFUSED
    assert "s3cr3t" not in "".join(capsys.readouterr())
    assert main(shlex.split(command)[3:]) == EXIT_REFUSED
    error = capsys.readouterr().err
    for key in ("endpoint.run_key", "cluster.rank_env.WHATEVER", "cluster.replica_env", "sync.directory", "oc.env"):
        assert key in error


def test_causes_and_log_ends_are_found_in_groups_each_once():
    lost = OSError("replica-0 died")
    lost.add_note("the end of replica-0.log:\n    out of memory")
    noted = ValueError("rank 0 failed")
    noted.add_note("the end of trainer-0.log:")
    rollouts = _chained(RuntimeError("stage rollout failed"), ExceptionGroup("rollouts", [KeyError("b")]))
    error = ExceptionGroup("all", [_chained(RuntimeError("stage publish failed"), lost), lost, noted, rollouts])
    assert log_ends(error) == ["the end of replica-0.log:\n    out of memory", "the end of trainer-0.log:"]
    assert list(causes(error)) == [
        "stage publish failed: OSError: replica-0 died",
        "replica-0 died",
        "rank 0 failed",
        "stage rollout failed: 'b'",
    ]


def test_the_cause_of_a_failed_run_has_the_line_of_a_users_code():
    def of(rewards):
        return {}["missing"]

    with pytest.raises(KeyError) as raised:
        of([])
    (line,) = causes(_chained(RuntimeError("stage train failed"), raised.value))
    assert line == f"stage train failed: KeyError: 'missing' ({__file__}:{of.__code__.co_firstlineno + 1} in of)"


def _chained(error, cause):
    error.__cause__ = cause
    return error


def test_full_collections_are_rare_in_the_driver(monkeypatch, tmp_path):
    class Program:
        def __init__(self, config, *, resume_command):
            self.before = gc.get_threshold()

        async def run(self):
            assert gc.get_threshold()[2] > 10 * self.before[2] and gc.get_freeze_count() > 0

    thresholds = gc.get_threshold()
    monkeypatch.setattr("async_rl.controller.launcher.Launcher", Program)
    try:
        assert main([f"output_dir={tmp_path}"]) == 0
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
