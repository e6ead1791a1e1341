"""Requests and answers in bulk: every answer once, cancelled ones never, failures to their own caller."""

from __future__ import annotations

import asyncio

import numpy as np

from agent_loop.engine import AnswerError, EngineError, GenerateRequest
from async_rl.engines.inbox import RequestInbox
from tests.fakes import FakeEngine


def always_one(_token_ids):
    return 1


def request(name, *, tokens=3):
    return GenerateRequest(request_id=name, token_ids=np.array([5], np.int32), max_new_tokens=tokens)


async def collect_all(inbox, count):
    answers = {}
    while len(answers) < count:
        for name, answer in await inbox.collect(timeout_s=5):
            assert name not in answers
            answers[name] = answer
    return answers


async def test_every_answer_is_collected_once():
    inbox = RequestInbox(FakeEngine(always_one))
    inbox.submit([request("a.", tokens=2), request("b.", tokens=9)])
    inbox.submit([request("c.", tokens=4)])
    answers = await collect_all(inbox, 3)
    assert {name: len(segments[0]) for name, segments in answers.items()} == {"a.": 2, "b.": 9, "c.": 4}
    assert await inbox.collect(timeout_s=0.01) == []


async def test_a_failure_is_the_answer_of_its_own_request_and_keeps_its_type():
    def fail(ask):
        return {"bad.": AnswerError("replica fake: rows"), "odd.": RuntimeError("boom")}.get(ask.request_id)

    inbox = RequestInbox(FakeEngine(always_one, fail=fail))
    inbox.submit([request("bad."), request("odd."), request("good.")])
    answers = await collect_all(inbox, 3)
    assert isinstance(answers["bad."], AnswerError)
    assert type(answers["odd."]) is EngineError
    assert str(answers["odd."]) == "request odd.: RuntimeError: boom"
    assert len(answers["good."][0]) == 3


async def test_a_cancelled_request_leaves_the_engine_and_gets_no_answer():
    engine = FakeEngine(always_one, token_s=0.01)
    inbox = RequestInbox(engine)
    inbox.submit([request("long.", tokens=10_000), request("short.", tokens=2)])
    await asyncio.sleep(0)
    inbox.cancel(["long.", "unknown."])
    assert set(await collect_all(inbox, 1)) == {"short."}
    assert engine.in_flight == 0
    assert await inbox.collect(timeout_s=0.01) == []


async def test_answers_that_stand_together_travel_together():
    inbox = RequestInbox(FakeEngine(always_one))
    inbox.submit([request(f"{i}.") for i in range(64)])
    assert len(await inbox.collect(timeout_s=5)) == 64
