"""Tokens per second of agent programs over HTTP, against the same turns on the bare engine.

    bare   the turns as token requests to the replica, without a session
    HTTP   the endpoint, with a client in another process

    python benchmarks/gateway.py [--engine vllm|sglang] [--sessions 256] [--calls 3] [--tokens 128] [--rounds 6]

Conversations with several calls run at once; each call has the conversation so far. All ways have the same questions
and the same number of sampled tokens: an answer has its drawn length, and its last token is replaced with the end of
the turn. The ways take turns on one engine. Intervals are 95 % bootstrap over rounds.
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
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import numpy as np
import psutil
import uvloop
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_loop.chat import Chat
from agent_loop.engine import Engine, GenerateRequest, SamplingConfig
from agent_loop.loop import Message, TurnLimits
from agent_loop.programs.endpoint.host import EndpointConfig, Sessions
from agent_loop.programs.endpoint.turns import turn_reader
from agent_loop.programs.session import AgentSession
from async_rl.compat.garbage import make_collections_rare
from async_rl.inference.select import ReplicaSettings, actor_environment, start_replica
from async_rl.inference.sglang.config import SglangConfig
from async_rl.inference.vllm.config import VllmConfig
from async_rl.weights.model_info import read_model_info
from benchmarks.support import in_turns, markdown_table, paired_ratio, say, show
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


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """That of the calculator with more words, so that few answers have the end of a turn in their middle."""
    fields = json.loads(build_tokenizer().backend_tokenizer.to_str())
    known = fields["model"]["vocab"]
    known |= {f" w{number}": number for number in range(len(known), VOCABULARY)}
    return with_chat_template(Tokenizer.from_str(json.dumps(fields)))


class ForcedTurns:
    """Engine whose answers have exactly the tokens that were asked for, and end their turn there only.

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


def converse(
    base_url: str, keys: Sequence[str], questions: Sequence[Sequence[str]], lengths: Sequence[Sequence[int]]
) -> None:
    """Body of the client's process: all conversations at once, over one connection each."""
    address = urlsplit(base_url)
    assert address.hostname is not None and address.port is not None

    async def hold(number: int) -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 22)
        head = f"POST {address.path}/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        head += f"authorization: Bearer {keys[number]}\r\ncontent-type: application/json\r\ncontent-length: "
        messages: list[object] = []
        for question, length in zip(questions[number], lengths[number], strict=True):
            messages.append({"role": "user", "content": question})
            body = json.dumps({"model": "policy", "messages": messages, "max_tokens": length})
            writer.write(f"{head}{len(body)}\r\n\r\n{body}".encode())
            answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            content = await reader.readexactly(int(answer.partition("content-length: ")[2].partition("\r")[0]))
            if not answer.startswith("http/1.1 200"):
                raise RuntimeError(f"{answer}{content.decode()}")
            messages.append(json.loads(content)["choices"][0]["message"])
        writer.close()

    async def hold_all() -> None:
        await asyncio.gather(*map(hold, range(len(keys))))

    uvloop.run(hold_all())


async def bare(engine: Engine, load: Load, name: str) -> None:
    """Requests to the engine."""

    async def ask(number: int) -> None:
        session, ids, held = f"{name}-{number}", np.zeros(0, np.int32), 1
        for call, observation in enumerate(load.observations[number]):
            ids = np.concatenate([ids, observation])
            request = GenerateRequest(
                request_id=f"{session}#{call}.",
                token_ids=ids,
                max_new_tokens=load.lengths[number][call],
                existing_rows=held - 1,
                session=session,
                cache_salt=session,
            )
            ids = np.concatenate([ids, *(part.token_ids for part in await engine.generate(request))])
            held = len(ids)

    await asyncio.gather(*map(ask, range(len(load.questions))))


async def over_http(
    session: Callable[[str], AgentSession], served: Sessions, client: ProcessPoolExecutor, load: Load, name: str
) -> None:
    """Sessions over HTTP."""
    async with AsyncExitStack() as stack:
        made = [session(f"{name}-{number}") for number in range(len(load.questions))]
        access = [await stack.enter_async_context(served.serve(each)) for each in made]
        given = (access[0].base_url, [each.api_key for each in access], load.questions, load.lengths)
        await asyncio.get_running_loop().run_in_executor(client, converse, *given)


def session_of(engine: Engine, chat: Chat, routing: RoutingSpec | None, limits: TurnLimits, name: str) -> AgentSession:
    """A session that an agent program would call."""
    return AgentSession(
        Trajectory(routing=routing),
        engine=engine,
        chat=chat,
        read=turn_reader(word_tokenizer(), family="qwen3_moe"),
        limits=limits,
        sampling=SamplingConfig(),
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
    routing, chat = read_model_info(checkpoint).routing, Chat(word_tokenizer(), end_of_turn=END_OF_TURN)
    settings = ReplicaSettings(engine=config, captures_routing=True)
    replica = await start_replica(settings, name="replica-0", checkpoint=checkpoint)
    engine = ForcedTurns(replica, end=chat.stop_token_ids[0])
    session = partial(session_of, engine, chat, routing, TurnLimits(max_turns=args.calls, max_tokens=MAX_TOKENS))
    processes = {"worker": [psutil.Process()], "engine": psutil.Process().children(recursive=True)}
    served, client = Sessions(EndpointConfig()), ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    processes["client"] = [psutil.Process(client.submit(os.getpid).result())]
    order: dict[str, Way] = {"bare": partial(bare, engine), "HTTP": partial(over_http, session, served, client)}
    rounds: Rounds = {name: [] for name in order}
    make_collections_rare()  # as a rollout worker does
    try:
        for number, name in in_turns(order, rounds=args.rounds):
            sessions = args.sessions if number >= 0 else max(1, args.sessions // 8)
            load = draw(chat, sessions=sessions, calls=args.calls, tokens=args.tokens, seed=number + 1)
            measured = await measure(order[name], load, f"{number}-{name}", engine=engine, processes=processes)
            say(f"round {number}, {name}: {measured}")
            if number >= 0:
                rounds[name].append(measured)
        return rounds
    finally:
        await served.close()
        client.shutdown()
        await replica.close()


def report(rounds: Rounds) -> None:
    """A row for each way."""
    rows: list[list[str]] = []
    for name, found in rounds.items():
        ratios = (
            paired_ratio([getattr(each, speed) for each in found], [getattr(each, speed) for each in rounds["bare"]])
            for speed in ("tokens_per_s", "tokens_per_cpu_s")
        )
        cpu = (f"{median(each.cpu_ms[process] for each in found):.2f}" for process in PROCESSES)
        rate = f"{median(each.tokens_per_s for each in found):.0f}"
        rows.append([name, rate, *(f"{ratio:.3f}" for ratio in ratios), *cpu])
    header = (
        "way",
        "tokens/s",
        "/ bare",
        "/ bare, by CPU time",
        *(f"{each}, ms of CPU per call" for each in PROCESSES),
    )
    show(f"{markdown_table(header, rows)}\n\ngoal: HTTP / bare at least {GOAL}")


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

    dense = [0] if args.engine == "vllm" else []  # SGLang knows no dense layers
    with tempfile.TemporaryDirectory() as folder:
        model = qwen3_moe_config(vocab_size=VOCABULARY, mlp_only_layers=dense, max_position_embeddings=2 * MAX_TOKENS)
        checkpoint = save_checkpoint(model, Path(folder), seed=0)
        rounds = uvloop.run(compare(args, config, checkpoint))
    show(f"{args.engine}: {args.sessions} sessions of {args.calls} calls, {args.tokens} tokens a call on average\n")
    report(rounds)


if __name__ == "__main__":
    main()
