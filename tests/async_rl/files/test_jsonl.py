"""Lines of JSON, whose ends have a test with each reader."""

import pytest

from async_rl.files.jsonl import read_lines


def test_read_lines_replaces_bytes_that_are_not_utf8_only_if_asked(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'"\xff"\n')
    assert read_lines(path, errors="replace") == ['"\ufffd"\n']
    with pytest.raises(UnicodeDecodeError):
        read_lines(path)
