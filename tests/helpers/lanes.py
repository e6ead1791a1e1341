"""Marks of tests. `make test` runs a few marked ones, chosen by the commit (tests/conftest.py)."""

import pytest

WHOLE_RUN = pytest.mark.drawn(2, of="whole run")
OWN_ENGINE = pytest.mark.drawn(3, of="engine of one test")
