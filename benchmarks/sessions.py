"""Memory and CPU time of agent sessions in one rollout worker, on an engine that answers at once.

    python benchmarks/sessions.py

idle: sessions of four calls each stay open; bytes of this process per session.
calls: concurrent sessions are called over loopback by a client in a process of its own; CPU per call of the worker.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_loop.chat import Chat
from agent_loop.conversation import ChatRequest
from agent_loop.engine import GenerateRequest, SamplingConfig
from agent_loop.loop import Message, TurnLimits
from agent_loop.session import AgentSession
from async_rl.compat.garbage import make_collections_rare
from async_rl.endpoint.config import EndpointConfig
from async_rl.endpoint.host import Sessions
from async_rl.endpoint.turns import turn_reader
from benchmarks.lean_client import LeanClient
from benchmarks.support import show
from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import END_OF_TURN, build_tokenizer

SPEC = RoutingSpec(layers=(0, 1, 2), num_experts=8, top_k=2)
TURN = 32  # tokens of an answer
CALLS = 4  # of a session
BURSTS = 7  # of calls; the one with the least CPU time was disturbed least
LIMITS = TurnLimits(max_turns=CALLS, max_tokens=4096)


class InstantEngine:
    """Answers each request with the same turn."""

    def __init__(self, turn: list[int]) -> None:
        self._turn = np.asarray(turn, np.int32)

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        n, held = len(self._turn), len(request.token_ids)
        rows = np.zeros((held + n - 1 - request.existing_rows, 3, 2), np.uint8)
        rows[..., 1] = 1
        return [
            TokenOutput(
                token_ids=self._turn,
                logprobs=np.full(n, -0.5, np.float32),
                routed_experts=RoutedExperts(first_position=request.existing_rows, experts=rows),
                weights=WeightVersion(0, "d"),
                stop_reason=StopReason.STOP,
                replica="r",
            )
        ]


TOKENIZER = build_tokenizer()
CHAT = Chat(TOKENIZER, end_of_turn=END_OF_TURN)
READ = turn_reader(TOKENIZER, family="qwen3_moe")
ENGINE = InstantEngine(TOKENIZER.encode("x" * (TURN - 1) + END_OF_TURN, add_special_tokens=False))


def session(number: int) -> AgentSession:
    return AgentSession(
        Trajectory(routing=SPEC),
        engine=ENGINE,
        chat=CHAT,
        read=READ,
        limits=LIMITS,
        sampling=SamplingConfig(),
        name=f"s{number}",
        cache_salt="",
    )


async def converse(calls: AgentSession) -> None:
    messages: tuple[Message, ...] = ()
    for turn in range(CALLS):
        messages = (*messages, Message(role="user", content=f"question {turn} of {calls.name}"))
        messages = (*messages, (await calls.answer(ChatRequest(messages=messages, agent="policy"))).message)


async def idle(count: int) -> float:
    """KB of memory per open session."""
    host, process = Sessions(EndpointConfig()), psutil.Process()
    async with AsyncExitStack() as stack:
        for number in range(200):  # what is loaded once
            await converse(session(number))
        gc.collect()
        before = process.memory_info().rss
        for number in range(count):
            calls = session(number)
            await stack.enter_async_context(host.serve(calls))
            await converse(calls)
        gc.collect()
        used = process.memory_info().rss - before
    await host.close()
    return used / count / 1000


async def calls(count: int) -> tuple[float, float]:
    """Milliseconds of CPU per call of this process: with HTTP, and of the session alone."""
    host, client = Sessions(EndpointConfig()), await LeanClient.start()
    questions = [[f"question {turn} of s{number}" for turn in range(CALLS)] for number in range(count)]
    async with AsyncExitStack() as stack:
        access = [await stack.enter_async_context(host.serve(session(number))) for number in range(count)]
        started = time.process_time()
        await client.converse(access[0].base_url, keys=[each.api_key for each in access], questions=questions)
        over_http = (time.process_time() - started) / count / CALLS
    await host.close()
    await client.close()
    started = time.process_time()
    await asyncio.gather(*(converse(session(number)) for number in range(count)))
    return over_http * 1e3, (time.process_time() - started) / count / CALLS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=10_000, help="open sessions")
    parser.add_argument("--at-once", type=int, default=256, help="sessions that make calls")
    chosen = parser.parse_args()
    assert Path("/proc").is_dir(), "memory is read from /proc"
    make_collections_rare()  # as a rollout worker does
    bursts = [uvloop.run(calls(chosen.at_once)) for _ in range(BURSTS)]
    http, alone = (min(burst[way] for burst in bursts) for way in (0, 1))
    show(f"{chosen.at_once} sessions: {http:.2f} ms of CPU per call, {alone:.2f} ms without HTTP")
    show(f"{chosen.idle} idle sessions of {CALLS} calls: {uvloop.run(idle(chosen.idle)):.1f} KB each")


if __name__ == "__main__":
    main()
