"""Marks of tests. `make test` runs a few marked ones, chosen by the commit (tests/conftest.py)."""

import pytest

WHOLE_RUN = pytest.mark.drawn(2, of="whole run")
OWN_ENGINE = pytest.mark.drawn(2, of="engine of one test")


def chosen_cases(request, name):
    """Values of the parameter `name` in the tests of this module that run, for a fixture that makes all at once."""
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return [*dict.fromkeys(item.callspec.params[name] for item in tests if name in item.callspec.params)]
