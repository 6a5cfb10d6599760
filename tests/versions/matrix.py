"""What is tried: one setting that all are compared with, and one for each version that differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NEWEST = "newest"
"""The newest Python that this machine or Debian's archive has."""

BROKER_CORE = (
    "tests/acceptance/test_chain.py",
    "tests/acceptance/test_retries.py",
    "tests/acceptance/test_failure_policies.py",
    "tests/acceptance/test_pools.py",
    "tests/acceptance/test_inline.py",
    "tests/acceptance/test_runs.py",
    "tests/acceptance/test_lists.py",
)
"""What a broker has a part in."""

SHORT_CORE = (
    "tests/integration/test_claims.py",
    "tests/integration/test_stream.py",
    "tests/integration/test_fenced_writes.py",
    "tests/integration/test_outbox_writes.py",
    "tests/integration/test_twophase.py",
    "tests/integration/test_locking.py",
    "tests/integration/test_old_servers.py",
    "tests/acceptance/test_chain.py",
    "tests/acceptance/test_retries.py",
)
"""One file for each thing that a version could break: for the two cells that `.ci/run` has, with all at once."""

CORE = (
    *SHORT_CORE,
    "tests/integration/test_outbox_dispatcher.py",
    "tests/integration/test_outbox_relay.py",
    "tests/integration/test_once.py",
    "tests/integration/test_twophase_across.py",
    "tests/integration/test_twophase_inside.py",
    "tests/integration/test_twophase_recovery.py",
    "tests/acceptance/test_failure_policies.py",
    "tests/acceptance/test_pools.py",
    "tests/acceptance/test_once_in_workers.py",
)
"""Every kind of call to MongoDB, and the promises with real listeners, workers of every pool, retries and kills."""


@dataclass(frozen=True, slots=True)
class Cell:
    """
    One setting.

    Attributes:
        name: what the command line and the table call it.
        python: `"3.11"`, or `NEWEST`.
        mongodb: a key of `servers.MONGODB`.
        redis: a key of `servers.REDIS`.
        packages: pins for pip, by distribution: `{"celery": "==5.5.*"}`; what is left out is the newest.
        broker: `redis`, or RabbitMQ with queues of one type: `classic`, `quorum`.
        tests: files.
    """

    name: str
    python: str = "3.11"
    mongodb: str = "6.0.5"
    redis: str = "6.2"
    packages: Mapping[str, str] = field(default_factory=dict)
    broker: str = "redis"
    tests: tuple[str, ...] = CORE


_OLDEST = Cell(
    "oldest",
    mongodb="4.4",
    tests=SHORT_CORE,
    packages={"celery": "==5.5.0", "kombu": "==5.5.*", "pymongo": "==4.9", "redis": "==4.5.2", "click": "==8.1.3"},
)
_NEWEST = Cell("newest", python=NEWEST, mongodb="6.0.27", redis="8.0", tests=SHORT_CORE)

MATRIX = (
    _OLDEST,
    _NEWEST,
    Cell("mongodb-4.4", mongodb="4.4"),
    Cell("mongodb-5.0", mongodb="5.0"),
    Cell("mongodb-6.0.27", mongodb="6.0.27"),
    Cell("celery-5.5", packages={"celery": "==5.5.*", "kombu": "==5.5.*"}),
    Cell("celery-5.6", packages={"celery": "==5.6.*", "kombu": "==5.6.*"}),
    Cell("pymongo-4.9", packages={"pymongo": "==4.9.*"}),
    Cell("pymongo-4.13", packages={"pymongo": "==4.13.*"}),
    Cell("redis-7.0", redis="7.0"),
    Cell("redis-8.0", redis="8.0"),
    Cell("valkey-9", redis="valkey-9"),
    Cell("python-3.12", python="3.12"),
    Cell("python-3.13", python="3.13"),
    Cell("python-3.14", python="3.14"),
    Cell("rabbitmq-classic", broker="classic", tests=BROKER_CORE),
    Cell("rabbitmq-quorum", broker="quorum", tests=BROKER_CORE),
)
"""The setting that they are compared with is that of the daily suite: all newest, and MongoDB 6.0.5."""

CELLS = {cell.name: cell for cell in MATRIX}

SHORT = ("oldest", "newest")
"""The ones that `.ci/run` has."""
