"""Tokens per second through a replica, and through an agent loop's decoder, against the same requests on bare vLLM.

All ways run in one process on one engine, turn by turn in changing order, so that what else the machine does hits them
alike. Prompts are new to the prefix cache each time. A ratio near 1 says that the layers above vLLM cost nothing. The
ratio of CPU seconds (this process and the engine's) is the steadier figure on a busy machine.

    python benchmarks/replica_throughput.py [--rounds 9] [--concurrency 64] [--tokens 64] [--checkpoint DIR]

Each of --strides is a way of its own. With fewer places (--places) than requests, a request that continues a turn waits
behind those that have not started:

    python benchmarks/replica_throughput.py --rounds 3 --concurrency 24 --places 16 --tokens 2048 --strides 256 1024
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_loop.decoder import SegmentDecoder, observe_prompt
from agent_loop.engine import GenerateRequest, SamplingConfig
from agent_loop.loop import TurnLimits
from async_rl.inference.vllm.engine import VllmConfig, VllmReplica, engine_environment, start_vllm
from async_rl.weights.model_info import ModelInfo, read_model_info
from benchmarks.support import show
from message_queue.trajectory import Trajectory

GOAL = 0.95
Way = Callable[[str, Any], Awaitable[int]]


def ways(
    replica: VllmReplica, *, info: ModelInfo, tokens: int, max_model_len: int, strides: Sequence[int] = ()
) -> dict[str, Way]:
    """Name -> (request id, prompt) -> tokens sampled. strides: values of limits.segment_tokens, each a way."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = replica.backend.engine

    async def bare(name: str, prompt: Any) -> int:
        params = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        ask: Any = {"type": "token", "prompt_token_ids": prompt.tolist(), "cache_salt": name}
        count = 0
        async for output in engine.generate(ask, params, request_id=name):
            count = len(output.outputs[0].token_ids)
        return count

    async def through_replica(name: str, prompt: Any) -> int:
        request = GenerateRequest(request_id=name, token_ids=prompt, max_new_tokens=tokens, cache_salt=name)
        return sum(map(len, await replica.generate(request)))

    async def through_decoder(name: str, prompt: Any, *, segment_tokens: int) -> int:
        limits = TurnLimits(max_turns=1, max_tokens=max_model_len, segment_tokens=segment_tokens)
        decoder = SegmentDecoder(
            replica, sampling=SamplingConfig(), stop_token_ids=(), session=name, cache_salt=name, limits=limits
        )
        trajectory = Trajectory(routing=info.routing)
        observe_prompt(trajectory, prompt, index=0, limits=limits)
        stop_reason = await decoder.decode(trajectory, max_new_tokens=tokens)
        trajectory.close(stop_reason=stop_reason, reward=0.0)
        trajectory.sequences()
        return trajectory.num_sampled

    whole = partial(through_decoder, segment_tokens=tokens)
    in_strides = {f"strides of {stride}": partial(through_decoder, segment_tokens=stride) for stride in strides}
    return {"bare vLLM": bare, "replica": through_replica, "agent loop + replica": whole, **in_strides}


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of wall time and per second of CPU time."""

    per_second: float
    per_cpu_second: float


async def measure(way: Way, prompts: list[Any], *, name: str, processes: list[psutil.Process]) -> Speed:
    """Speed of one burst."""
    started, started_cpu = time.perf_counter(), cpu_seconds(processes)
    tokens = sum(await asyncio.gather(*(way(f"{name}-{i}", prompt) for i, prompt in enumerate(prompts))))
    return Speed(tokens / (time.perf_counter() - started), tokens / (cpu_seconds(processes) - started_cpu))


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Spent so far by all of `processes`."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


async def compare(args: argparse.Namespace, config: VllmConfig, checkpoint: Path) -> dict[str, list[Speed]]:
    """Way -> speed of every round."""
    info = read_model_info(checkpoint)
    replica = await start_vllm(config, name="replica-0", checkpoint=checkpoint)
    try:
        candidates = ways(
            replica, info=info, tokens=args.tokens, max_model_len=config.max_model_len, strides=args.strides
        )
        random = np.random.default_rng(0)
        processes = [psutil.Process(), *(psutil.Process(p.pid) for p in replica.backend.processes)]
        rates: dict[str, list[Speed]] = {name: [] for name in candidates}
        for turn in range(-1, args.rounds):
            shift = turn % len(candidates)
            order = [*candidates][shift:] + [*candidates][:shift]
            prompts = [
                random.integers(3, info.vocab_size, args.prompt).astype(np.int32) for _ in range(args.concurrency)
            ]
            for number, name in enumerate(order):
                rate = await measure(candidates[name], prompts, name=f"{turn}.{number}", processes=processes)
                if turn >= 0:  # the first round warms up
                    rates[name].append(rate)
        return rates
    finally:
        await replica.close()


def report(rates: dict[str, list[Speed]]) -> None:
    """Median speed and, per round, the ratio to bare vLLM: median and quartiles."""
    base = rates["bare vLLM"]
    for name, values in rates.items():
        low, median, high = quartiles([a.per_second / b.per_second for a, b in zip(values, base, strict=True)])
        cpu = quartiles([a.per_cpu_second / b.per_cpu_second for a, b in zip(values, base, strict=True)])
        verdict = "" if values is base else f"  goal {GOAL}: {'met' if median >= GOAL else 'MISSED'}"
        rate = f"{statistics.median(value.per_second for value in values):8.0f} tokens/s"
        spread = f"ratio {median:.3f} [{low:.3f} .. {high:.3f}]   CPU {cpu[1]:.3f} [{cpu[0]:.3f} .. {cpu[2]:.3f}]"
        show(f"{name:22} {rate}   {spread}{verdict}")


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 9), ("concurrency", 64), ("prompt", 32), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--places", type=int, default=None, help="requests that run at once; default: all")
    parser.add_argument("--strides", type=int, nargs="*", default=[], help="values of limits.segment_tokens")
    parser.add_argument("--checkpoint", type=Path, default=None, help="Hugging Face MoE folder; default: a tiny one")
    args = parser.parse_args()
    config = VllmConfig(
        max_model_len=args.prompt + args.tokens, max_num_seqs=args.places or args.concurrency, kv_cache_bytes=256 << 20
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(engine_environment(config))
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint
        if checkpoint is None:
            from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint

            checkpoint = save_checkpoint(
                qwen3_moe_config(vocab_size=512, max_position_embeddings=2 * config.max_model_len), Path(folder), seed=0
            )
        show(
            f"{args.concurrency} concurrent, {args.prompt} prompt + {args.tokens} sampled tokens, {args.rounds} rounds"
        )
        report(asyncio.run(compare(args, config, checkpoint)))


if __name__ == "__main__":
    main()
