"""
The pytest plugin. Use `-p mongo_celery.testing.plugin` if entry points are disabled.

Every suite of an environment loads it, so it imports nothing, and tests request its fixtures explicitly. One check is
always active in a suite that has imported transactions: `require_sessions` around each test. Options are in pytest's
configuration, as for pytest-django, pytest-flask and xdist.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pymongo import MongoClient

    from mongo_celery import Bridge
    from mongo_celery.testing.processes import BridgeWorkers
    from mongo_celery.testing.runner import BridgeRunner

BRIDGE = "mongo_celery_bridge"
MONGODB = "mongo_celery_mongodb_url"
BROKER = "mongo_celery_broker_url"
FENCE_TARGET = "mongo_celery_fence_target"
WORKER = "{worker}"
SESSIONLESS = "mongo_celery_sessionless"
TRANSACTIONS = "mongo_celery.mongo.transaction"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a suite's configuration."""
    parser.addini(BRIDGE, "bridges for bridge_runner, as module:name, separated by spaces", default="")
    parser.addini(
        MONGODB, f"URL of a replica set, with {WORKER} for the xdist process. By default one is started", default=""
    )
    parser.addini(FENCE_TARGET, "object that mongo_celery.testing.contract examines, as module:function", default="")
    parser.addini(
        BROKER, f"URL of a broker for real workers, with {WORKER} as above. By default a Redis is started", default=""
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", f"{SESSIONLESS}: the test may write without session= inside a transaction")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that writes without `session=` inside a transaction, unless the marker allows it."""
    if TRANSACTIONS not in sys.modules or item.get_closest_marker(SESSIONLESS) is not None:
        return (yield)
    from mongo_celery.testing.sessions import require_sessions

    with require_sessions():
        return (yield)


@pytest.fixture(scope="session")
def mongo_celery_mongodb_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """Give the URL of MongoDB: the configured one, or that of a replica set started for this session."""
    yield from _serve(find_url(pytestconfig, MONGODB), "MongoReplicaSet")


@pytest.fixture(scope="session")
def mongo_celery_broker_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """Give the broker URL for real workers: the configured one, or that of a Redis started for this session."""
    yield from _serve(find_url(pytestconfig, BROKER), "RedisServer")


@pytest.fixture(scope="session")
def mongo_celery_client(mongo_celery_mongodb_url: str) -> Iterator[MongoClient[dict[str, Any]]]:
    """Give one client per session, for the test's writes. Forked children must make their own."""
    from pymongo import MongoClient

    with MongoClient[dict[str, Any]](mongo_celery_mongodb_url) as client:
        yield client


@pytest.fixture
def mongo_celery_emptied(pytestconfig: pytest.Config, mongo_celery_client: MongoClient[dict[str, Any]]) -> None:
    """Empty every collection of the session's own MongoDB, and keep the indexes. Refuse a configured URL."""
    from mongo_celery.testing.processes import empty

    if find_url(pytestconfig, MONGODB):
        raise pytest.UsageError(
            f"mongo_celery_emptied would remove all documents of the server in {MONGODB}, which may be used for "
            f"other data. Empty your collections in the test, or unset {MONGODB}.",
        )
    empty(mongo_celery_client)


@pytest.fixture
def mongo_celery_bridges(pytestconfig: pytest.Config) -> list[Bridge]:
    """Give the bridges that `bridge_runner` runs. If a factory makes them, override this fixture."""
    names = str(pytestconfig.getini(BRIDGE)).split()
    if not names:
        raise pytest.UsageError(
            f"bridge_runner does not know the bridge. Set {BRIDGE} = shop.celery:bridge in pytest's "
            "configuration, or write a fixture mongo_celery_bridges that returns a list of bridges.",
        )
    return [_bridge_named(name) for name in names]


@pytest.fixture
def bridge_runner(mongo_celery_bridges: list[Bridge], mongo_celery_mongodb_url: str) -> Iterator[BridgeRunner]:
    """Give a `BridgeRunner` of the suite's bridges. `deliver()` delivers the changes that the test writes."""
    from mongo_celery.testing.runner import BridgeRunner

    with BridgeRunner(*mongo_celery_bridges, url=mongo_celery_mongodb_url) as runner:
        yield runner


@pytest.fixture
def bridge_workers(
    mongo_celery_bridges: list[Bridge], mongo_celery_mongodb_url: str, mongo_celery_broker_url: str, tmp_path: Path
) -> Iterator[BridgeWorkers]:
    """Give `BridgeWorkers` of the suite's bridges: `start` starts a real worker with a listener."""
    from mongo_celery.testing.processes import BridgeWorkers

    with BridgeWorkers(mongo_celery_bridges, mongo_celery_mongodb_url, mongo_celery_broker_url, tmp_path) as workers:
        yield workers


def _serve(url: str, server: str) -> Iterator[str]:
    """Yield the given URL, or that of an embedded server that runs during the session."""
    if url:
        yield url
        return
    from mongo_celery import embedded

    with getattr(embedded, server)() as started:
        yield started.url


def find_url(config: pytest.Config, option: str) -> str:
    """Return a configured URL for this xdist process. Empty if there is none."""
    url, worker = str(config.getini(option)), getattr(config, "workerinput", None)
    if url and worker is not None and WORKER not in url:
        raise pytest.UsageError(
            f"Several xdist processes would share the data of {option}. Write {WORKER} in a part that must "
            "differ, such as the database's name. Or unset the option, so that each process starts a server.",
        )
    return url.replace(WORKER, worker["workerid"] if worker is not None else "main")


def _bridge_named(name: str) -> Bridge:
    """Return the bridge that the configuration names as `module:name`."""
    import importlib

    from mongo_celery import Bridge

    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # an import of the module itself failed
        raise pytest.UsageError(
            f"{BRIDGE} = {name}: there is no module {error.name}. Install the project, or set pythonpath in "
            "pytest's configuration to the directory of its packages, such as pythonpath = .",
        ) from None
    if not isinstance(found, Bridge):
        raise pytest.UsageError(f"{BRIDGE} = {name} is not a Bridge. Write module:name, such as shop.celery:bridge.")
    return found
