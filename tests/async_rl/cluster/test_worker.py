"""How a rollout worker is built, and the driver's side of workers that do not answer."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from async_rl.cluster import rpc, worker
from async_rl.cluster.build_worker import build_worker
from async_rl.cluster.worker import WorkerClient
from async_rl.config import load_config
from async_rl.files.rollouts import FailedRollout
from async_rl.inference.pool import ReplicaPool
from async_rl.rollout.dispatcher import Dispatcher, WorkerLostError
from async_rl.rollout.task import build_task
from message_queue.trajectory import Admission
from recipes.calculator.model import TinyModelConfig, save_initial_checkpoint
from recipes.calculator.reward import ExactAnswer
from recipes.calculator.tokenizer import build_tokenizer
from tests.helpers.fakes import FakeEngine, SeededScript

SCRIPT = SeededScript(0, vocab_size=40, stop_token=1, mean_length=8)
FOR_EVER_S = 1e6  # longer than any test runs


class FakeActor:
    """Keeps the names of its calls. blocked: it answers none until it is killed. unreachable: answers of Ray to the
    first calls after the kill; None is a result."""

    def __init__(self, *, blocked, unreachable=()):
        self.blocked, self.killed, self.calls, self.answers = blocked, False, [], []
        self.unreachable = list(unreachable)

    def kill(self):
        self.killed = True
        for answer in self.answers:
            if not answer.done():
                answer.set_exception(RayActorError())

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: self.answer(args[0] if name == "call" else name))

    def answer(self, name):
        self.calls.append(name)
        answer = asyncio.get_running_loop().create_future()
        self.answers.append(answer)
        error = None
        if self.killed:
            error = self.unreachable.pop(0) if self.unreachable else RayActorError()
        if error is not None:
            answer.set_exception(error)
        elif self.killed or not self.blocked:
            answer.set_result(None)
        return answer


@pytest.fixture
def built(tmp_path):
    """A function: overrides -> worker, a prompt, and the engine of the worker."""

    def build(*overrides):
        save_initial_checkpoint(tmp_path, tokenizer=build_tokenizer(), seed=0, config=TinyModelConfig())
        config, engine = load_config(["trainer.router_replay=none", *overrides]), FakeEngine(SCRIPT, routing=None)
        made = build_worker(config, name="worker-0", checkpoint=tmp_path, pool=ReplicaPool([engine]))
        return made, build_task(config.task, seed=0).train_prompt(7), engine

    return build


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers
@pytest.mark.parametrize("own", [(), ("validation.sampling.temperature=0",)], ids=["of the run", "of its own"])
async def test_held_out_prompts_are_sampled_as_the_config_of_validation_says(own, built):
    worker, prompt, engine = built("rollout.sampling.temperature=0.5", *own)
    await worker.validate([(0, prompt)], number=1)
    await worker.roll(prompt, Admission(group=0, prompt=0, admitted_version=0, admitted_update=0), handout=0)
    asked = {(request.session.startswith("validation"), request.sampling.temperature) for request in engine.requests}
    assert asked == {(True, 0.0 if own else 0.5), (False, 0.5)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers
@pytest.mark.parametrize("steps", [500, 0])
async def test_a_failed_rollout_is_reported_as_text_if_rollouts_are_recorded(steps, built, monkeypatch):
    async def score(_self, _prompt, *, completion):
        raise KeyError("unit")

    monkeypatch.setattr(ExactAnswer, "score", score)
    worker, prompt, _ = built(f"rollout.record.steps={steps}", "rollout.failure.max_retries=0")
    await worker.roll(prompt, Admission(group=3, prompt=7, admitted_version=0, admitted_update=0), handout=0)
    found = [event for event in await worker.events() if isinstance(event, FailedRollout)]
    assert bool(found) == bool(steps)
    for rollout in found:
        assert (rollout.group, rollout.prompt_index) == (3, 7) and prompt.messages[-1].content in rollout.prompt
        assert "KeyError: 'unit'" in rollout.error and f"{Path(__file__).name}:" in rollout.error
        whole = rollout.prompt + "".join(turn["text"] + turn["reply"] for turn in rollout.turns)
        assert len(build_tokenizer().encode(whole)) == rollout.tokens


@pytest.fixture
def workers(monkeypatch):
    """A worker that is blocked in user code and one that answers, by name."""
    monkeypatch.setattr(rpc.ray, "kill", FakeActor.kill)
    actors = {"worker-0": FakeActor(blocked=True), "worker-1": FakeActor(blocked=False)}
    limits = {"timeout_s": FOR_EVER_S, "stop_timeout_s": 0.01}
    return {name: (actor, WorkerClient(actor, name=name, **limits)) for name, actor in actors.items()}


async def test_blocked_worker_delays_a_stop_by_the_time_limit_of_a_stop(workers):
    (blocked, handle), (free, other) = workers.values()
    dispatcher = Dispatcher([handle, other], pool=ReplicaPool([FakeEngine(SCRIPT)]))
    async with asyncio.timeout(30):
        await dispatcher.flush()
        await dispatcher.end()
        for worker in (handle, other):
            await worker.close(timeout_s=FOR_EVER_S)
    assert blocked.calls == ["flush", "pid"] and blocked.killed
    assert free.calls == ["flush", "end", "end", "pid"] and free.killed


async def test_closing_a_blocked_worker_kills_it(workers):
    blocked, handle = workers["worker-0"]
    async with asyncio.timeout(30):
        with pytest.raises(WorkerLostError, match="worker-0"):
            await handle.close(timeout_s=FOR_EVER_S)
    assert blocked.calls == ["end", "pid"] and blocked.killed


@pytest.mark.parametrize("call", [Dispatcher.pause, Dispatcher.resume])
@pytest.mark.parametrize("first", ["call", "end_soon"])
async def test_blocked_worker_delays_a_publish_no_longer_than_a_stop(first, call, workers):
    (blocked, handle), (free, other) = workers.values()
    dispatcher = Dispatcher([handle, other], pool=ReplicaPool([FakeEngine(SCRIPT)]))
    if first == "end_soon":
        dispatcher.end_soon()
    publish = asyncio.create_task(call(dispatcher))
    if first == "call":
        await asyncio.sleep(0.05)  # longer than the time limit of a stop
        assert not publish.done(), "a tool may take its time while the run continues"
        dispatcher.end_soon()
    async with asyncio.timeout(30):
        await publish
        await dispatcher.end()
    assert blocked.calls == ["adopt", "flush"]
    assert [made for made in free.calls if made != "flush"] == ["adopt", "end"]


@pytest.mark.parametrize("answer", [None, ActorUnavailableError("connection refused", None)])
@pytest.mark.parametrize(("times", "timeout_s"), [(3, FOR_EVER_S), (10_000, 0.01)], ids=["dies", "stays"])
async def test_closing_a_worker_waits_in_bounds_until_ray_reports_it_dead(answer, times, timeout_s, monkeypatch):
    monkeypatch.setattr(rpc.ray, "kill", FakeActor.kill)
    monkeypatch.setattr(worker, "GONE_S", 0)
    actor = FakeActor(blocked=False, unreachable=[answer] * times)
    async with asyncio.timeout(30):
        await WorkerClient(actor, name="worker-0", timeout_s=5, stop_timeout_s=5).close(timeout_s=timeout_s)
    assert actor.killed and bool(actor.unreachable) == (times > 3)
    if times == 3:
        assert actor.calls == ["end", *["pid"] * 4], "the last one says that it is dead"
