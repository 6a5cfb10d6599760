"""
Fixtures are plugins, one file per concern. Generated examples are the same in every run.

Tests run in several processes, each with servers of its own: most of their time is waiting.
"""

import os

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

pytest_plugins = [
    "tests.fixtures.memory",
    "tests.fixtures.bytecode",
    "tests.fixtures.leaks",
    "tests.fixtures.mongo",
    "tests.fixtures.rights",
    "tests.fixtures.redis",
    "tests.fixtures.failpoint",
    "tests.fixtures.proxy",
    "tests.fixtures.forked",
    "tests.fixtures.process",
    "tests.fixtures.sentinel",
    "tests.fixtures.rabbitmq",
    "tests.fixtures.tracing",
    "tests.fixtures.browser",
]

_PROCESSES_PER_CORE = 2
_PROCESSES_MAX = 8


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means; tests that are named one by one stay in this process, where a debugger reaches them."""
    if all("::" in argument for argument in config.args):
        return 0
    return min(_PROCESSES_PER_CORE * (os.cpu_count() or 1), _PROCESSES_MAX)
