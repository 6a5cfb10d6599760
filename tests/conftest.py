"""
Fixtures are plugins, one file per concern. Generated examples are the same in every run.

Tests run in several processes, each with servers of its own: most of their time is waiting.
"""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

pytest_plugins = [
    "tests.fixtures.memory",
    "tests.fixtures.leaks",
    "tests.fixtures.mongo",
    "tests.fixtures.name_server",
    "tests.fixtures.redis",
    "tests.fixtures.failpoint",
    "tests.fixtures.proxy",
    "tests.fixtures.forked",
    "tests.fixtures.process",
    "tests.fixtures.rights",
    "tests.fixtures.sentinel",
    "tests.fixtures.rabbitmq",
    "tests.fixtures.tracing",
    "tests.fixtures.browser",
    "tests.rig.project",
    "tests.rig.deployment",
    "tests.rig.outbox",
    "tests.integration.clusters_rig",
    "tests.integration.django_rig",
]

_PROCESSES_PER_CORE = 3
_PROCESSES_MAX = 8
_LONGEST = ("test_drill.py", "test_printed_commands.py")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means; tests that are named one by one stay in this process, where a debugger reaches them."""
    if all("::" in argument for argument in config.args):
        return 0
    return min(_PROCESSES_PER_CORE * (os.cpu_count() or 1), _PROCESSES_MAX)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests, in whatever order the others are: nobody waits for one in the end."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """
    Collect tests without collecting garbage: what is made then stays, and looking through it is a quarter of it.

    From then on there is garbage, and nothing of what was collected is; also in the process that xdist is led from.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
