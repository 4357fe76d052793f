"""Tests: options and fixtures of every test file.

    pytest                                  the scripts of this repository
    pytest --impl DIR                       the scripts in DIR (a student's folder, a mutant)
    pytest tests/test_ppo.py -k gae         one function
    pytest --hidden-seed 7                  other random inputs
    pytest -m slow                          what takes minutes, and nothing else
"""

import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

pytest.register_assert_rewrite("oracles")
import oracles  # noqa: E402,F401  before --impl enters the path: DIR cannot replace it

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption("--impl", default=str(ROOT), metavar="DIR",
                     help="folder holding the grpo.py, ppo.py, common.py ... under test")
    parser.addoption("--hidden-seed", type=int, default=0, metavar="N",
                     help="seed of the random inputs")


def pytest_configure(config):
    folder = Path(config.getoption("--impl")).resolve()
    if not folder.is_dir():
        raise pytest.UsageError(f"--impl {folder}: no such folder")
    sys.path.insert(0, str(folder))
    config.addinivalue_line("markers", "slow: takes minutes; left out unless asked for: -m slow")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("markexpr"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def impl(request):
    """The folder under test."""
    return Path(request.config.getoption("--impl")).resolve()


@pytest.fixture
def rng(request):
    """Random numbers of this test alone: the same whichever other tests run."""
    name = zlib.crc32(request.node.nodeid.split("/")[-1].encode())
    return np.random.default_rng([request.config.getoption("--hidden-seed"), name])
