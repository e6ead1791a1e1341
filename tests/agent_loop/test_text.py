"""Text that becomes safe for UTF-8."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.text import safe_text, safe_value

ANY_TEXT = st.text(st.characters(codec=None), max_size=20)


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain", "plain"),
        ("smile \ud83d", "smile �"),
        ("\udc00", "�"),
        ("\ud83d\ude00", "😀"),
        ("\ude00\ud83d", "��"),
        ("é\ud800x", "é�x"),
    ],
)
def test_a_lone_surrogate_becomes_a_replacement_character_and_a_pair_its_character(text, safe):
    assert safe_text(text) == safe


@given(ANY_TEXT)
def test_safe_text_can_be_encoded_and_stays_as_it_is(text):
    once = safe_text(text)
    once.encode()
    assert safe_text(once) == once


@given(st.text())
def test_text_that_can_be_encoded_does_not_change(text):
    assert safe_text(text) == text


def test_keys_and_values_at_any_depth_become_safe():
    found = safe_value(json.loads('{"\\ud83d": ["\\udc00", {"a": "\\ud83d\\ude00"}, 1, null]}'))
    assert found == {"�": ["�", {"a": "😀"}, 1, None]}
