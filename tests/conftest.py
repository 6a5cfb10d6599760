"""Fixtures are plugins, one file per concern."""

pytest_plugins = [
    "tests.fixtures.leaks",
    "tests.fixtures.mongo",
    "tests.fixtures.redis",
    "tests.fixtures.failpoint",
    "tests.fixtures.proxy",
    "tests.fixtures.process",
]
