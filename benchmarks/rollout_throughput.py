"""Tokens per second of the whole rollout path against the same requests on bare vLLM, at equal decode work.

    path    Dispatcher -> WorkerClient -> rollout worker: Rollouter, single-turn agent loop, content files, object store
            -> ReplicaRouter -> ReplicaClient -> Ray actor -> VllmReplica -> vLLM, as in a run
    bare    vLLM's AsyncLLM in an actor of its own that gets all prompts, as token ids, in one call

Both engines have the same arguments, routing capture included, and every request the same sampling parameters and
budget; no token stops it. Both decode groups of 8 requests, as many groups at a time as --concurrency holds. The two
take turns, so that what else the machine does hits both alike. Equal budgets make requests end together, so that the
engine waits whenever 64 of them go through the path at once; --spread S draws budgets from tokens * (1 - S) ..
tokens * (1 + S), as replies of a real rollout end one by one. --profile also runs the handle without worker and agent
loop, and counts the CPU seconds of each process.

    python benchmarks/rollout_throughput.py [--rounds 9] [--concurrency 64] [--requests 192] [--tokens 96] [--spread 0]
        [--profile] [--checkpoint DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import uvloop
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_loop.chat import Chat
from agent_loop.control_tokens import Tokenizer
from agent_loop.engine import Engine, GenerateRequest, SamplingConfig
from agent_loop.loop import AgentLoop, Prompt, TurnLimits
from agent_loop.single_turn import SingleTurnLoop
from agent_loop.tools import PauseGate
from async_rl.cluster.placement import start_ray
from async_rl.cluster.replica import ReplicaClient
from async_rl.cluster.worker import WorkerClient
from async_rl.config import RunConfig, load_config
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.replica import EngineReplica
from async_rl.inference.vllm.config import VllmConfig, check_engine, engine_args
from async_rl.inference.vllm.engine import engine_environment
from async_rl.inference.vllm.process import start_engine
from async_rl.inference.vllm.segment import sampling_params
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.group_contents import ContentPlace
from async_rl.rollout.rollouter import DroppedGroup
from async_rl.rollout.task import TaskConfig, build_task
from async_rl.weights.model_info import ModelInfo, read_model_info
from benchmarks.support import CpuClock, markdown_table, say, show
from message_queue.contract import Admission
from message_queue.tokens import Int32Array
from message_queue.trajectory import Trajectory
from recipes.calculator.reward import ExactAnswer
from recipes.calculator.task import CalculatorConfig, CalculatorTask, build_chat

GOAL = 0.95
GROUP = 8  # trajectories of a prompt
PROMPT_TOKENS = 64  # room for a prompt of the task
Way = Callable[[str], Awaitable[int]]  # name of the burst -> tokens sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests in groups of GROUP."""

    budgets: tuple[int, ...]
    """Tokens that each request samples, those of a group one after the other."""
    concurrency: int
    """Requests at a time, in whole groups."""

    @property
    def num_groups(self) -> int:
        """Groups of all requests."""
        return len(self.budgets) // GROUP

    async def each(self, work: Callable[[int], Awaitable[int]]) -> int:
        """Sum over all groups."""
        places = asyncio.Semaphore(self.concurrency // GROUP)

        async def one(group: int) -> int:
            async with places:
                return await work(group)

        return sum(await asyncio.gather(*(one(i) for i in range(self.num_groups))))

    async def each_request(self, work: Callable[[int], Awaitable[int]]) -> int:
        """Sum over all requests, those of a group side by side."""

        async def group(number: int) -> int:
            return sum(await asyncio.gather(*(work(number * GROUP + i) for i in range(GROUP))))

        return await self.each(group)


class BareVllm:
    """AsyncLLM and nothing else: requests go in, the count of sampled tokens comes out."""

    async def start(self, config: VllmConfig, checkpoint: Path) -> None:
        model = check_engine(config, checkpoint=checkpoint, capture_routing=True)
        self._info = model.info
        self._engine: Any = await start_engine(engine_args(config, model, capture_routing=True))

    async def burst(self, requests: Sequence[GenerateRequest], load: Load) -> int:
        """Decode all; returns tokens sampled."""

        async def decode(index: int) -> int:
            request, count = requests[index], 0
            params = sampling_params(request, info=self._info, capture_routing=True)
            prompt = {"prompt_token_ids": request.token_ids.tolist(), "cache_salt": request.cache_salt}
            async for output in self._engine.generate(prompt, params, request_id=request.request_id):
                count = len(output.outputs[0].token_ids)
            return count

        return await load.each_request(decode)

    async def pid(self) -> int:
        return os.getpid()

    async def close(self) -> None:
        self._engine.shutdown()


def endless_chat(tokenizer: Any) -> Chat:
    """The task's chat, in which no token ends a turn."""
    chat = build_chat(tokenizer)
    chat.stop_token_ids = ()
    return chat


def draw_budgets(requests: int, *, tokens: int, spread: float) -> tuple[int, ...]:
    """Tokens that each request samples, uniform in tokens * (1 - spread) .. tokens * (1 + spread)."""
    drawn = np.random.default_rng(0).uniform(tokens * (1 - spread), tokens * (1 + spread), size=requests)
    return tuple(max(1, round(budget)) for budget in drawn.tolist())


class BudgetLoop:
    """An AgentLoop in which each rollout of a burst has the budget of its request."""

    def __init__(self, loops: Mapping[int, SingleTurnLoop], *, load: Load) -> None:
        self._loops = loops
        self._load = load

    async def run(self, prompt: Prompt, *, trajectory: Trajectory, session: str, cache_salt: str) -> None:
        number = prompt.index * GROUP + int(session.rpartition("-t")[2])
        loop = self._loops[self._load.budgets[number]]
        await loop.run(prompt, trajectory=trajectory, session=session, cache_salt=cache_salt)


class EndlessTask(CalculatorTask):
    """The calculator in one turn that no token ends."""

    def __init__(self, *, load: Load, seed: int) -> None:
        super().__init__(CalculatorConfig(), seed=seed)
        self._load = load

    def build_loop(
        self,
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        sampling: SamplingConfig,
        limits: TurnLimits,
        gate: PauseGate | None = None,
    ) -> AgentLoop:
        """See Task."""
        chat = endless_chat(tokenizer)

        def loop_of(budget: int) -> SingleTurnLoop:
            bounds = TurnLimits(max_turns=1, max_tokens=limits.max_tokens, max_new_tokens_per_turn=budget)
            return SingleTurnLoop(engine=engine, chat=chat, reward=ExactAnswer(), limits=bounds, sampling=sampling)

        return BudgetLoop({budget: loop_of(budget) for budget in set(self._load.budgets)}, load=self._load)


def endless_task(options: Mapping[str, Any], *, seed: int) -> EndlessTask:
    """The task as a rollout worker builds it. options: `budgets` and `concurrency` of Load."""
    load = Load(budgets=tuple(options["budgets"]), concurrency=options["concurrency"])
    return EndlessTask(load=load, seed=seed)


@asynccontextmanager
async def rollout_path(
    config: RunConfig, *, checkpoint: Path, replica: ReplicaClient, info: ModelInfo, folder: Path
) -> AsyncGenerator[tuple[Dispatcher, WorkerClient]]:
    """A rollout worker in its process, which stores content in `folder`, and the dispatcher of the driver."""
    worker = WorkerClient.create(config.cluster, name="worker-0", options={"num_cpus": 1})
    await worker.start(config, checkpoint=checkpoint, replicas=[replica])
    dispatcher = Dispatcher([worker], pool=ReplicaPool([replica]), note=say)
    place = ContentPlace(
        directory=folder,
        run="benchmark",
        fsync=False,
        trajectories=GROUP,
        routing=info.routing,
        resume_routing=config.rollout.resume_routing,
    )
    await dispatcher.open(place, live=())
    watch = asyncio.create_task(dispatcher.watch())
    try:
        yield dispatcher, worker
    finally:
        watch.cancel()
        await worker.close(timeout_s=config.cluster.stop_timeout_s)


def rollout_way(dispatcher: Dispatcher, *, prompts: Sequence[Prompt], load: Load) -> Way:
    """Prompts in, heads and references to content out. Each burst has a version, so that no prefix cache serves it."""
    bursts = 0

    async def run(name: str) -> int:
        nonlocal bursts
        burst, bursts = bursts, bursts + 1
        first = burst * load.num_groups

        async def roll(group: int) -> int:
            admission = Admission(
                group=first + group, prompt=prompts[group].index, admitted_version=burst, admitted_update=0
            )
            head, _ = await dispatcher.roll(prompts[group], admission)
            if isinstance(head, DroppedGroup):
                raise RuntimeError(f"group {head.group} was dropped: {head.reason}")
            return head.num_tokens

        tokens = await load.each(roll)
        await dispatcher.forget(range(first, first + load.num_groups))
        return tokens

    return run


def plain_requests(
    name: str, *, token_ids: Sequence[Int32Array], load: Load, config: RunConfig
) -> list[GenerateRequest]:
    """The requests that the agent loops make. token_ids: of the prompt of each group."""
    return [
        GenerateRequest(
            request_id=f"{name}-{i}#0.",
            token_ids=token_ids[i // GROUP],
            max_new_tokens=budget,
            sampling=config.rollout.sampling,
            cache_salt=name,
        )
        for i, budget in enumerate(load.budgets)
    ]


@dataclass(slots=True, kw_only=True)
class Rates:
    """What was measured of one way. tokens_per_s: of every round. cpu: process -> CPU seconds over all rounds."""

    tokens_per_s: list[float] = field(default_factory=list[float])
    tokens: int = 0
    cpu: dict[str, float] = field(default_factory=dict[str, float])


async def take_turns(ways: dict[str, Way], *, rounds: int, clock: CpuClock | None) -> dict[str, Rates]:
    """Way -> rates; the order turns with the round, and a first round warms up."""
    found = {name: Rates() for name in ways}
    for number in range(-1, rounds):
        shift = number % len(ways)
        for name in [*ways][shift:] + [*ways][:shift]:
            cpu = clock.seconds() if clock else {}
            started = time.perf_counter()
            tokens = await ways[name](f"{name.replace(' ', '_')}.{number}")
            rate = tokens / (time.perf_counter() - started)
            say(f"round {number}: {name} {rate:.0f} tokens/s")
            if number < 0:
                continue
            found[name].tokens_per_s.append(rate)
            found[name].tokens += tokens
            for process, seconds in (clock.seconds() if clock else {}).items():
                found[name].cpu[process] = found[name].cpu.get(process, 0.0) + seconds - cpu[process]
    return found


async def compare(config: RunConfig, *, checkpoint: Path, load: Load, rounds: int, profile: bool) -> str:
    """The tables: rates with ratios to bare vLLM, and CPU seconds when profiled."""
    task, info = build_task(config.task, seed=config.seed), read_model_info(checkpoint)
    chat = endless_chat(AutoTokenizer.from_pretrained(checkpoint))
    prompts = [task.train_prompt(i) for i in range(load.num_groups)]
    token_ids = [chat.prompt(prompt.messages) for prompt in prompts]
    assert isinstance(config.engine, VllmConfig)
    environment = {"env_vars": engine_environment(config.engine)}
    bare: Any = ray.remote(BareVllm).options(num_cpus=1, runtime_env=environment).remote()  # pyright: ignore[reportAttributeAccessIssue]
    replica, _ = await asyncio.gather(
        ReplicaClient.start(config, name="replica-0", checkpoint=checkpoint, places=[{"num_cpus": 1}]),
        bare.start.remote(config.engine, checkpoint),
    )

    async def on_bare(name: str) -> int:
        return await bare.burst.remote(plain_requests(name, token_ids=token_ids, load=load, config=config), load)

    async def through_handle(name: str) -> int:
        requests = plain_requests(name, token_ids=token_ids, load=load, config=config)
        return await load.each_request(lambda i: _sampled(replica, requests[i]))

    try:
        with tempfile.TemporaryDirectory(prefix="rollout-throughput-") as folder:
            content = Path(folder) / "content"
            async with rollout_path(config, checkpoint=checkpoint, replica=replica, info=info, folder=content) as (
                dispatcher,
                worker,
            ):
                through_worker = rollout_way(dispatcher, prompts=prompts, load=load)
                ways: dict[str, Way] = {"bare vLLM": on_bare, "whole path": through_worker}
                clock = None
                if profile:
                    ways["handle only"] = through_handle
                    pids = {
                        "worker": await worker.pid(timeout_s=60),
                        "replica": await replica.pid(timeout_s=60),
                        "bare": await bare.pid.remote(),
                    }
                    clock = CpuClock(pids)
                found = await take_turns(ways, rounds=rounds, clock=clock)
        return rates_table(found) + ("\n\n" + cpu_table(found) if profile else "")
    finally:
        await replica.close(timeout_s=config.cluster.stop_timeout_s)
        await bare.close.remote()


async def _sampled(replica: ReplicaClient, request: GenerateRequest) -> int:
    return sum(map(len, await replica.call(EngineReplica.generate, request)))


def rates_table(found: dict[str, Rates]) -> str:
    """Median rate and, per round, the ratio to bare vLLM: median, quartiles, ends."""
    base = found["bare vLLM"].tokens_per_s
    rows: list[Sequence[str]] = []
    for name, rates in found.items():
        ratios = [value / other for value, other in zip(rates.tokens_per_s, base, strict=True)]
        low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        rows.append(
            (
                name,
                f"{np.median(rates.tokens_per_s):.0f}",
                f"{median:.3f}",
                f"{low:.3f} .. {high:.3f}",
                f"{min(ratios):.3f} .. {max(ratios):.3f}",
                "" if name == "bare vLLM" else f">= {GOAL} {'met' if median >= GOAL else 'missed'}",
            )
        )
    return markdown_table(("way", "tokens/s", "ratio, median", "quartiles", "range", "goal"), rows)


def cpu_table(found: dict[str, Rates]) -> str:
    """CPU seconds per 1000 sampled tokens of every process that took part."""
    rows = [
        (name, process, f"{1000 * seconds / rates.tokens:.4f}")
        for name, rates in found.items()
        for process, seconds in rates.cpu.items()
        if seconds > 0.005 * sum(rates.cpu.values())
    ]
    return markdown_table(("way", "process", "CPU s per 1000 tokens"), rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 9), ("concurrency", 64), ("requests", 192), ("tokens", 96)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--spread", type=float, default=0.0, help="of the budgets around --tokens, 0 up to below 1")
    parser.add_argument("--profile", action="store_true", help="also run the handle alone, and count CPU seconds")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder of the task's model; default: random")
    args = parser.parse_args(arguments)
    for name in ("rounds", "concurrency", "requests", "tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; must be >= 1")
    for name in ("concurrency", "requests"):
        if getattr(args, name) % GROUP:
            parser.error(f"--{name} is {getattr(args, name)}; must be a multiple of {GROUP}, the requests of a group")
    if not 0 <= args.spread < 1:
        parser.error(f"--spread is {args.spread}; must be in [0, 1)")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    warnings.simplefilter("ignore")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    budgets = draw_budgets(args.requests, tokens=args.tokens, spread=args.spread)
    load = Load(budgets=budgets, concurrency=args.concurrency)
    config = load_config(
        [
            f"engine.max_num_seqs={args.concurrency}",
            f"engine.max_num_batched_tokens={max(4096, args.concurrency)}",
            f"engine.max_model_len={PROMPT_TOKENS + max(budgets)}",
            f"rollout.limits.max_tokens={PROMPT_TOKENS + max(budgets)}",
            f"rollout.trajectories_per_group={GROUP}",
        ]
    )
    options = {"budgets": budgets, "concurrency": args.concurrency}
    task = TaskConfig(factory="benchmarks.rollout_throughput:endless_task", options=options)
    config = replace(config, task=task)
    with tempfile.TemporaryDirectory(prefix="async_rl-") as folder:
        checkpoint = args.checkpoint
        if checkpoint is None:
            checkpoint = Path(folder) / "model"
            build_task(config.task, seed=config.seed).save_initial_checkpoint(checkpoint)
        os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])  # for the actors
        start_ray(config.cluster)
        try:
            size = f"{min(budgets)} to {max(budgets)} tokens each"
            show(f"{args.requests} requests, {args.concurrency} at a time, {size}\n")
            show(
                uvloop.run(compare(config, checkpoint=checkpoint, load=load, rounds=args.rounds, profile=args.profile))
            )
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
