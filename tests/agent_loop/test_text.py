"""Text that becomes safe for UTF-8."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.text import safe_text, safe_value


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


@given(st.text(st.characters(codec=None), max_size=20))
def test_safe_text_can_be_encoded_and_only_surrogates_change(text):
    once = safe_text(text)
    once.encode()
    assert once == text or any("\ud800" <= character <= "\udfff" for character in text)


def test_keys_and_values_at_any_depth_become_safe():
    found = safe_value(json.loads('{"\\ud83d": ["\\udc00", {"a": "\\ud83d\\ude00"}, 1, null]}'))
    assert found == {"�": ["�", {"a": "😀"}, 1, None]}
