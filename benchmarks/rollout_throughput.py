"""Tokens per second of the whole rollout path against the same requests on bare vLLM, at equal decode work.

    path    Dispatcher -> WorkerClient -> rollout worker: Rollouter, single-turn agent loop, content files, object store
            -> ReplicaRouter -> ReplicaClient -> Ray actor -> VllmReplica -> vLLM, as in a run
    bare    vLLM's AsyncLLM in another actor that gets all prompts, as token ids, in one call

Both engines have the same arguments, routing capture included, and every request the same sampling parameters and
number of tokens; no token stops it. Both decode groups of 8 requests, as many groups at a time as --concurrency holds.
The two take turns, so that the load of the machine hits both alike. Equal numbers make requests end together, so that
the engine waits whenever 64 requests go through the path at once.

    python benchmarks/rollout_throughput.py [--rounds 9] [--concurrency 64] [--requests 192] [--tokens 96]
        [--checkpoint DIR] [--drafts 3]    # a third way: bare vLLM with up to 3 n-gram drafts in a forward pass
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import uvloop
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_loop.chat import Chat
from agent_loop.engine import GenerateRequest
from agent_loop.loop import AgentLoop, Prompt
from agent_loop.single_turn import SingleTurnLoop
from async_rl.cluster.placement import start_ray
from async_rl.cluster.replica import ReplicaClient
from async_rl.cluster.worker import WorkerClient
from async_rl.config import RunConfig, load_config
from async_rl.inference.gate import DraftCounts
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.vllm.config import Speculation, VllmConfig, check_engine, engine_args
from async_rl.inference.vllm.engine import engine_environment
from async_rl.inference.vllm.process import start_engine
from async_rl.inference.vllm.segment import draft_counts, sampling_params
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.group_contents import ContentPlace
from async_rl.rollout.rollouter import DroppedGroup
from async_rl.rollout.task import TaskConfig, build_task
from async_rl.weights.model_info import ModelInfo, read_model_info
from benchmarks.support import in_turns, markdown_table, say, show
from message_queue.trajectory import Admission
from recipes.calculator.reward import ExactAnswer
from recipes.calculator.task import CalculatorConfig, CalculatorTask, build_chat

GOAL = 0.95
GROUP = 8  # trajectories of a prompt
PROMPT_TOKENS = 64  # room for a prompt of the task
Way = Callable[[str], Awaitable[int]]  # name of the burst -> tokens sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of a burst, in groups of GROUP."""

    num_groups: int
    """Groups of all requests."""
    at_once: int
    """Groups at a time."""

    async def each(self, work: Callable[[int], Awaitable[int]]) -> int:
        """Sum over all groups."""
        places = asyncio.Semaphore(self.at_once)

        async def one(group: int) -> int:
            async with places:
                return await work(group)

        return sum(await asyncio.gather(*map(one, range(self.num_groups))))


class BareVllm:
    """AsyncLLM and nothing else: requests go in, the count of sampled tokens comes out."""

    async def start(self, config: VllmConfig, checkpoint: Path) -> None:
        model = check_engine(config, checkpoint=checkpoint, capture_routing=True)
        self._info, self._drafts = model.info, DraftCounts()
        self._engine: Any = await start_engine(engine_args(config, model, capture_routing=True))

    async def burst(self, requests: Sequence[GenerateRequest], load: Load) -> int:
        """Decode all; returns tokens sampled."""

        async def decode(request: GenerateRequest) -> int:
            count = 0
            params = sampling_params(request, info=self._info, capture_routing=True)
            prompt = {"prompt_token_ids": request.token_ids.tolist(), "cache_salt": request.cache_salt}
            async for output in self._engine.generate(prompt, params, request_id=request.request_id):
                count = len(output.outputs[0].token_ids)
                self._drafts += draft_counts(output)
            return count

        async def group(number: int) -> int:
            return sum(await asyncio.gather(*map(decode, requests[number * GROUP : (number + 1) * GROUP])))

        return await load.each(group)

    async def close(self) -> DraftCounts:
        self._engine.shutdown()
        return self._drafts


def endless_chat(tokenizer: Any) -> Chat:
    """The task's chat, in which no token ends a turn."""
    chat = build_chat(tokenizer)
    chat.stop_token_ids = ()
    return chat


class EndlessTask(CalculatorTask):
    """The calculator in one turn that no token ends."""

    def build_loop(self, **given: Any) -> AgentLoop:
        """See Task."""
        chat, parts = endless_chat(given["tokenizer"]), {name: given[name] for name in ("engine", "limits", "sampling")}
        return SingleTurnLoop(chat=chat, reward=ExactAnswer(), **parts)


def endless_task(*, seed: int) -> EndlessTask:
    """The task as a rollout worker builds it."""
    return EndlessTask(CalculatorConfig(), seed=seed)


@asynccontextmanager
async def rollout_path(
    config: RunConfig, *, checkpoint: Path, replica: ReplicaClient, info: ModelInfo, folder: Path
) -> AsyncGenerator[Dispatcher]:
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
        yield dispatcher
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


async def compare(config: RunConfig, *, checkpoint: Path, load: Load, rounds: int, drafts: int) -> str:
    """The table."""
    task, info = build_task(config.task, seed=config.seed), read_model_info(checkpoint)
    chat = endless_chat(AutoTokenizer.from_pretrained(checkpoint))
    prompts = [task.train_prompt(i) for i in range(load.num_groups)]
    token_ids = [chat.prompt(prompt.messages) for prompt in prompts]
    assert isinstance(config.engine, VllmConfig)
    environment = {"env_vars": engine_environment(config.engine)}
    engines = {"bare vLLM": config.engine}
    if drafts:
        engines["with drafts"] = replace(config.engine, speculation=Speculation(method="ngram", tokens=drafts))
    host: Any = ray.remote(BareVllm).options(num_cpus=1, runtime_env=environment)  # pyright: ignore[reportAttributeAccessIssue]
    bare = {name: host.remote() for name in engines}
    replica, *_ = await asyncio.gather(
        ReplicaClient.start(config.replica_settings, name="replica-0", checkpoint=checkpoint, places=[{"num_cpus": 1}]),
        *(bare[name].start.remote(engine, checkpoint) for name, engine in engines.items()),
    )

    async def on_bare(engine: str, name: str) -> int:
        requests = [
            GenerateRequest(
                request_id=f"{name}-{i}#0.",
                token_ids=token_ids[i // GROUP],
                max_new_tokens=config.rollout.limits.max_new_tokens_per_turn or 0,
                sampling=config.rollout.sampling,
                cache_salt=name,
            )
            for i in range(load.num_groups * GROUP)
        ]
        return await bare[engine].burst.remote(requests, load)

    rates: dict[str, list[float]] = {name: [] for name in (*engines, "whole path")}
    try:
        with tempfile.TemporaryDirectory(prefix="rollout-throughput-") as folder:
            content = Path(folder) / "content"
            async with rollout_path(
                config, checkpoint=checkpoint, replica=replica, info=info, folder=content
            ) as dispatcher:
                ways: dict[str, Way] = {name: partial(on_bare, name) for name in engines}
                ways["whole path"] = rollout_way(dispatcher, prompts=prompts, load=load)
                for number, name in in_turns(ways, rounds=rounds):
                    started = time.perf_counter()
                    tokens = await ways[name](f"{name.replace(' ', '_')}.{number}")
                    rate = tokens / (time.perf_counter() - started)
                    say(f"round {number}: {name} {rate:.0f} tokens/s")
                    if number >= 0:
                        rates[name].append(rate)
        return table(rates)
    finally:
        await replica.close(timeout_s=config.cluster.stop_timeout_s)
        for name, engine in bare.items():
            say(f"{name}: {await engine.close.remote()}")


def table(rates: Mapping[str, Sequence[float]]) -> str:
    """Median rate and, per round, the ratio to bare vLLM: median and quartiles."""
    rows: list[Sequence[str]] = []
    for name, found in rates.items():
        ratios = [rate / base for rate, base in zip(found, rates["bare vLLM"], strict=True)]
        low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        rows.append((name, f"{np.median(found):.0f}", f"{median:.3f}", f"{low:.3f} .. {high:.3f}"))
    return markdown_table(("way", "tokens/s", f"ratio, goal {GOAL}", "quartiles"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 9), ("concurrency", 64), ("requests", 192), ("tokens", 96), ("drafts", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder of the task's model; default: random")
    args = parser.parse_args()
    if args.concurrency % GROUP or args.requests % GROUP:
        parser.error(f"--concurrency and --requests must be multiples of {GROUP}, the requests of a group")
    warnings.simplefilter("ignore")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    load = Load(num_groups=args.requests // GROUP, at_once=args.concurrency // GROUP)
    config = load_config(
        [
            f"engine.max_num_seqs={args.concurrency}",
            f"engine.max_num_batched_tokens={max(4096, args.concurrency)}",
            f"engine.max_model_len={PROMPT_TOKENS + args.tokens}",
            "rollout.limits.max_turns=1",
            f"rollout.limits.max_tokens={PROMPT_TOKENS + args.tokens}",
            f"rollout.limits.max_new_tokens_per_turn={args.tokens}",
            f"rollout.trajectories_per_group={GROUP}",
        ]
    )
    config = replace(config, task=TaskConfig(factory="benchmarks.rollout_throughput:endless_task"))
    with tempfile.TemporaryDirectory(prefix="async_rl-") as folder:
        checkpoint = args.checkpoint
        if checkpoint is None:
            checkpoint = Path(folder) / "model"
            build_task(config.task, seed=config.seed).save_initial_checkpoint(checkpoint)
        os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])  # for the actors
        start_ray(config.cluster)
        try:
            show(f"{args.requests} requests, {args.concurrency} at a time, {args.tokens} tokens each\n")
            show(uvloop.run(compare(config, checkpoint=checkpoint, load=load, rounds=args.rounds, drafts=args.drafts)))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
