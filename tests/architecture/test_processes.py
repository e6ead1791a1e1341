"""How the tests are spread over processes (`make test`)."""

import pytest


def test_tests_of_a_file_stay_in_one_process(request):
    """Else each process would start what they share."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("the tests run in one process")
    groups = {item.path: item.nodeid.partition("@")[2] for item in request.session.items}
    assert all(groups.values()), [path for path, group in groups.items() if not group][:5]
