"""Tests marked `slow` run whole trainings. They run when asked for: pytest -m slow tests/course"""

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: whole trainings; run with -m slow")


def pytest_collection_modifyitems(config, items):
    if config.getoption("markexpr"):
        return  # -m decides
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
