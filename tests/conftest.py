"""Fixtures are plugins, one file per concern. Generated examples are the same in every run."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

pytest_plugins = [
    "tests.fixtures.leaks",
    "tests.fixtures.mongo",
    "tests.fixtures.rights",
    "tests.fixtures.redis",
    "tests.fixtures.failpoint",
    "tests.fixtures.proxy",
    "tests.fixtures.process",
]
