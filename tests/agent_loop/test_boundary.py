"""The boundary around user code: nothing that it does ends, hangs or bends a run."""

import asyncio
import json

import pytest

from agent_loop.user_errors import LeakedError, describe_error


class Mute(Exception):
    def __str__(self):
        return self.detail


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("smile \ud83d"), "ValueError: smile \ufffd"),
        (Mute(), "Mute: (its text cannot be shown: AttributeError)"),
        (LeakedError(asyncio.CancelledError("a scope")), "CancelledError: a scope"),
        (ExceptionGroup("two", [ExceptionGroup("one", [KeyError("x")])]), "KeyError: 'x'"),
        (LeakedError(BaseExceptionGroup("one", [SystemExit(3)])), "SystemExit: 3"),
    ],
)
def test_every_error_has_a_text_that_can_be_written(error, text):
    assert describe_error(error) == text
    json.dumps(text).encode()
