"""Marks of tests of which `make test` runs a few, chosen by the commit (tests/conftest.py)."""

import pytest

WHOLE_RUN = pytest.mark.drawn(2, of="whole run")
OWN_ENGINE = pytest.mark.drawn(3, of="engine of one test")
