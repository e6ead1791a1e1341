"""Tokens per second of agent programs over HTTP, against the same turns on the bare engine.

    bare       the turns as token requests to the replica, without a session
    session    `AgentSession` in this process, without HTTP
    HTTP       the endpoint, with a client in a process of its own that costs little (`lean_client.py`)

    python benchmarks/gateway.py [--engine vllm|sglang] [--sessions 256] [--calls 3] [--tokens 128] [--rounds 6]

Conversations with several calls run at once; each call has the conversation so far. All ways have the same questions
and the same number of sampled tokens: an answer has its drawn length, and its last token is replaced with the end of
the turn. The ways take turns on one engine, in the order 1 2 3, then 3 2 1. Intervals are 95 % bootstrap over rounds.
The worker is this process: client side of the engine, sessions and endpoint. CPU is that of all threads of a process;
the ratio by CPU time, of worker and engine, is the steadier figure on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import uvloop
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_loop.chat import Chat
from agent_loop.conversation import ChatRequest
from agent_loop.engine import Engine, GenerateRequest, SamplingConfig
from agent_loop.loop import Message, TurnLimits
from agent_loop.session import AgentSession, TurnReader
from async_rl.compat.garbage import make_collections_rare
from async_rl.endpoint.config import EndpointConfig
from async_rl.endpoint.host import Sessions
from async_rl.endpoint.turns import turn_reader
from async_rl.inference.select import actor_environment, start_replica
from async_rl.inference.sglang.config import SglangConfig
from async_rl.inference.vllm.config import VllmConfig
from async_rl.weights.model_info import read_model_info
from benchmarks.lean_client import LeanClient
from benchmarks.support import Interval, markdown_table, say, show
from benchmarks.train_steps import paired_ratio
from message_queue.tokens import Int32Array, RoutingSpec, StopReason, TokenOutput
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import END_OF_TURN, build_tokenizer, with_chat_template

GOAL = 0.95
QUESTION = 48  # characters of a user message
MAX_TOKENS = 2048  # of a session
VOCABULARY = 2048
KV_BYTES = 1 << 30
PROCESSES = ("worker", "engine", "client")

Way = Callable[["Load", str], Awaitable[None]]
Processes = Mapping[str, Sequence[psutil.Process]]
Rounds = dict[str, list["Measured"]]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """That of the calculator with more words, so that few answers have the end of a turn in their middle."""
    fields = json.loads(build_tokenizer().backend_tokenizer.to_str())
    known = fields["model"]["vocab"]
    known |= {f" w{number}": number for number in range(len(known), VOCABULARY)}
    return with_chat_template(Tokenizer.from_str(json.dumps(fields)))


class ForcedTurns:
    """Engine of which each answer has exactly the tokens that were asked for, and ends its turn there only.

    Attributes:
        work: so far; see `Load.work`.
    """

    def __init__(self, engine: Engine, *, end: int) -> None:
        self._engine = engine
        self._end = end
        self.work = np.zeros(2, np.int64)

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        *before, last = await self._engine.generate(replace(request, stop_token_ids=()))
        ids = np.where(last.token_ids == self._end, VOCABULARY - 1, last.token_ids).astype(np.int32)
        ids[-1] = self._end
        self.work += request.max_new_tokens, len(request.token_ids) - request.existing_rows
        return [*before, replace(last, token_ids=ids, stop_reason=StopReason.STOP)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The conversations of a burst."""

    questions: Sequence[Sequence[str]]
    """Text of each user message, for each session."""
    observations: Sequence[Sequence[Int32Array]]
    """Tokens between answers that each question gives, for each session."""
    lengths: Sequence[Sequence[int]]
    """Sampled tokens of each answer, for each session."""

    @property
    def work(self) -> tuple[int, int]:
        """Sampled tokens, and tokens of all requests less the rows that their callers hold."""
        new = sum(len(ids) for session in self.observations for ids in session)
        return sum(map(sum, self.lengths)), new + self.num_calls - len(self.questions)

    @property
    def num_calls(self) -> int:
        """Calls of all sessions."""
        return sum(map(len, self.questions))


def draw(chat: Chat, *, sessions: int, calls: int, tokens: int, seed: int) -> Load:
    """Random questions, and answers of half to one and a half times `tokens`."""
    random = np.random.default_rng(seed)
    letters = random.integers(ord("a"), ord("z") + 1, (sessions, calls, QUESTION)).astype(np.uint8)
    questions = [[bytes(text).decode() for text in session] for session in letters]
    ended = np.array(chat.stop_token_ids[:1], np.int32)

    def observed(call: int, question: str) -> Int32Array:
        message = [Message(role="user", content=question)]
        return chat.reply(message, after=ended) if call else chat.prompt(message)

    return Load(
        questions=questions,
        observations=[[observed(call, text) for call, text in enumerate(session)] for session in questions],
        lengths=random.integers(tokens - tokens // 2, tokens + tokens // 2 + 1, (sessions, calls)).tolist(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One burst."""

    tokens_per_s: float
    """Sampled tokens per second of wall time."""
    tokens_per_cpu_s: float
    """Sampled tokens per second of CPU of worker and engine."""
    cpu_ms: Mapping[str, float]
    """Process -> milliseconds of CPU per call."""


class Ways:
    """The ways to hold the conversations of a burst, on one engine.

    Args:
        limits: of a session.
    """

    def __init__(
        self, engine: ForcedTurns, *, chat: Chat, read: TurnReader, routing: RoutingSpec | None, limits: TurnLimits
    ) -> None:
        self._engine = engine
        self._chat = chat
        self._read = read
        self._routing = routing
        self._limits = limits
        self._sampling = SamplingConfig()

    async def bare(self, load: Load, name: str) -> None:
        """Requests to the engine."""

        async def converse(number: int) -> None:
            session, ids, held = f"{name}-{number}", np.zeros(0, np.int32), 1
            for call, observation in enumerate(load.observations[number]):
                ids = np.concatenate([ids, observation])
                request = GenerateRequest(
                    request_id=f"{session}#{call}.",
                    token_ids=ids,
                    max_new_tokens=load.lengths[number][call],
                    existing_rows=held - 1,
                    sampling=self._sampling,
                    session=session,
                    cache_salt=session,
                )
                ids = np.concatenate([ids, *(part.token_ids for part in await self._engine.generate(request))])
                held = len(ids)

        await asyncio.gather(*map(converse, range(len(load.questions))))

    async def sessions(self, load: Load, name: str) -> None:
        """Sessions of this process."""

        async def converse(number: int) -> None:
            messages: tuple[Message, ...] = ()
            session = self._session(f"{name}-{number}")
            for question, length in zip(load.questions[number], load.lengths[number], strict=True):
                messages = (*messages, Message(role="user", content=question))
                request = ChatRequest(messages=messages, agent="policy", max_tokens=length)
                messages = (*messages, (await session.answer(request)).message)

        await asyncio.gather(*map(converse, range(len(load.questions))))

    async def http(self, load: Load, name: str, *, served: Sessions, client: LeanClient) -> None:
        """Sessions over HTTP."""
        async with AsyncExitStack() as stack:
            made = [self._session(f"{name}-{number}") for number in range(len(load.questions))]
            access = [await stack.enter_async_context(served.serve(session)) for session in made]
            keys = [each.api_key for each in access]
            await client.converse(access[0].base_url, keys=keys, questions=load.questions, max_tokens=load.lengths)

    def _session(self, name: str) -> AgentSession:
        return AgentSession(
            Trajectory(routing=self._routing),
            engine=self._engine,
            chat=self._chat,
            read=self._read,
            limits=self._limits,
            sampling=self._sampling,
            name=name,
            cache_salt=name,
        )


async def measure(way: Way, load: Load, name: str, *, engine: ForcedTurns, processes: Processes) -> Measured:
    """One burst.

    Raises:
        RuntimeError: the engine did other work than the load asks for.
    """
    done = engine.work.copy()
    before, started = cpu_seconds(processes), time.perf_counter()
    await way(load, name)
    seconds, after = time.perf_counter() - started, cpu_seconds(processes)
    if (engine.work - done).tolist() != [*load.work]:
        raise RuntimeError(f"{name}: the work of the engine is {engine.work - done}; the load asks for {load.work}")
    sampled, _ = load.work
    cpu = {process: after[process] - before[process] for process in before}
    return Measured(
        tokens_per_s=sampled / seconds,
        tokens_per_cpu_s=sampled / (cpu["worker"] + cpu["engine"]),
        cpu_ms={process: spent / load.num_calls * 1e3 for process, spent in cpu.items()},
    )


def cpu_seconds(processes: Processes) -> dict[str, float]:
    """Used so far."""
    return {name: sum(sum(process.cpu_times()[:2]) for process in group) for name, group in processes.items()}


async def compare(args: argparse.Namespace, config: VllmConfig | SglangConfig, checkpoint: Path) -> Rounds:
    """Way -> burst of every round."""
    routing, tokenizer = read_model_info(checkpoint).routing, word_tokenizer()
    chat = Chat(tokenizer, end_of_turn=END_OF_TURN)
    replica = await start_replica(config, name="replica-0", checkpoint=checkpoint, capture_routing=True)
    engine = ForcedTurns(replica, end=chat.stop_token_ids[0])
    read, limits = turn_reader(tokenizer, family="qwen3_moe"), TurnLimits(max_turns=args.calls, max_tokens=MAX_TOKENS)
    ways = Ways(engine, chat=chat, read=read, routing=routing, limits=limits)
    processes = {"worker": [psutil.Process()], "engine": psutil.Process().children(recursive=True)}
    client, served = await LeanClient.start(), Sessions(EndpointConfig())
    processes["client"] = [psutil.Process(client.pid)]
    order = {"bare": ways.bare, "session": ways.sessions, "HTTP": partial(ways.http, served=served, client=client)}
    rounds: Rounds = {name: [] for name in order}
    make_collections_rare()  # as a rollout worker does
    try:
        for number in range(-1, args.rounds):  # the first one warms up
            sessions = args.sessions if number >= 0 else max(1, args.sessions // 8)
            load = draw(chat, sessions=sessions, calls=args.calls, tokens=args.tokens, seed=number + 1)
            for name in order if number % 2 else reversed(order):
                measured = await measure(order[name], load, f"{number}-{name}", engine=engine, processes=processes)
                say(f"round {number}, {name}: {measured}")
                if number >= 0:
                    rounds[name].append(measured)
        return rounds
    finally:
        await served.close()
        await client.close()
        await replica.close()


def report(rounds: Rounds) -> None:
    """A row for each way, and the cost of the gateway beside that of the engine."""
    by_wall = {name: [each.tokens_per_s for each in found] for name, found in rounds.items()}
    by_cpu = {name: [each.tokens_per_cpu_s for each in found] for name, found in rounds.items()}
    cpu = {
        name: {process: median(each.cpu_ms[process] for each in found) for process in PROCESSES}
        for name, found in rounds.items()
    }
    rows = [
        (
            name,
            f"{median(by_wall[name]):,.0f}",
            plain(paired_ratio(by_wall[name], by_wall["bare"])),
            plain(paired_ratio(by_cpu[name], by_cpu["bare"])),
            *(f"{cpu[name][process]:.2f}" for process in PROCESSES),
        )
        for name in rounds
    ]
    header = (
        "way",
        "tokens/s",
        "/ bare",
        "/ bare, by CPU time",
        *(f"{name}, ms of CPU per call" for name in PROCESSES),
    )
    show(markdown_table(header, rows))
    session, http = (cpu[name]["worker"] - cpu["bare"]["worker"] for name in ("session", "HTTP"))
    engine = cpu["bare"]["worker"] + cpu["bare"]["engine"]
    show(
        f"\ngateway: {http:.2f} ms of CPU per call, of which the session has {session:.2f}; "
        f"the bare engine has {engine:.1f}, so that the gateway is {http / engine:.1%} of it"
    )
    for kind, speed in (("wall", by_wall), ("CPU", by_cpu)):
        ratio = paired_ratio(speed["HTTP"], speed["bare"]).value
        show(f"goal by {kind} time: HTTP / bare at least {GOAL}: {'met' if ratio >= GOAL else 'MISSED'}")


def plain(ratio: Interval) -> str:
    """value [low, high]."""
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def engine_config(args: argparse.Namespace) -> VllmConfig | SglangConfig:
    """A replica that runs all sessions at once."""
    if args.engine == "sglang":
        return SglangConfig(
            max_model_len=MAX_TOKENS, max_num_seqs=args.sessions, kv_cache_tokens=args.sessions * MAX_TOKENS
        )
    return VllmConfig(
        max_model_len=MAX_TOKENS,
        max_num_seqs=args.sessions,
        max_num_batched_tokens=max(2048, args.sessions),
        kv_cache_bytes=KV_BYTES,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    for name, default in (("sessions", 256), ("calls", 3), ("tokens", 128), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    config = engine_config(args)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(actor_environment(config))
    warnings.simplefilter("ignore")
    from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint

    dense = (0,) if args.engine == "vllm" else ()  # SGLang knows no dense layers
    with tempfile.TemporaryDirectory() as folder:
        model = qwen3_moe_config(vocab_size=VOCABULARY, dense_layers=dense, max_position_embeddings=2 * MAX_TOKENS)
        checkpoint = save_checkpoint(model, Path(folder), seed=0)
        rounds = uvloop.run(compare(args, config, checkpoint))
    show(f"{args.engine}: {args.sessions} sessions of {args.calls} calls, {args.tokens} tokens a call on average\n")
    report(rounds)


if __name__ == "__main__":
    main()
