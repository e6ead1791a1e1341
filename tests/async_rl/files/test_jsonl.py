"""JSON lines are cut at newline characters only."""

import pytest

from async_rl.files.jsonl import read_lines


def test_read_lines_cuts_at_newline_characters_only(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes('\ufeff"a\u2028b\u2029c\u0085d"\r\n\n1'.encode())
    assert read_lines(path) == ['"a\u2028b\u2029c\u0085d"\r\n', "\n", "1"]
    path.write_bytes(b"")
    assert read_lines(path) == []


def test_read_lines_replaces_bytes_that_are_not_utf8_only_if_asked(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'"\xff"\n')
    assert read_lines(path, errors="replace") == ['"\ufffd"\n']
    with pytest.raises(UnicodeDecodeError):
        read_lines(path)
