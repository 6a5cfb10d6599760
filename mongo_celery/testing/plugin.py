"""
The pytest plugin, `-p mongo_celery.testing.plugin` where entry points are switched off.

Every suite of an environment loads it, so it imports nothing, and no fixture acts by itself. One check does, in a suite
that has imported transactions: `require_sessions` around each test. Whatever is asked for stands in the configuration,
where pytest-django, pytest-flask and xdist find theirs.
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
WORKER = "{worker}"
SESSIONLESS = "mongo_celery_sessionless"
TRANSACTIONS = "mongo_celery.mongo.transaction"


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a suite may set."""
    parser.addini(BRIDGE, "the bridges that bridge_runner runs, as module:name, with spaces between", default="")
    parser.addini(MONGODB, f"of a replica set, {WORKER} for the xdist process; by default one is started", default="")
    parser.addini(BROKER, f"of a broker for real workers, {WORKER} as above; by default a Redis is started", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
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
    """Give the URL of MongoDB: the configured one, or of a replica set that is started for this session."""
    from mongo_celery.testing.processes import serving_mongodb

    with serving_mongodb(given_url(pytestconfig, MONGODB)) as url:
        yield url


@pytest.fixture(scope="session")
def mongo_celery_broker_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """Give the URL of a broker for real workers: the configured one, or of a Redis that is started for this session."""
    from mongo_celery.testing.processes import serving_redis

    with serving_redis(given_url(pytestconfig, BROKER)) as url:
        yield url


@pytest.fixture(scope="session")
def mongo_celery_client(mongo_celery_mongodb_url: str) -> Iterator[MongoClient[dict[str, Any]]]:
    """Give one client for the session, with the writes of a test. Forked children must make their own."""
    from pymongo import MongoClient

    with MongoClient[dict[str, Any]](mongo_celery_mongodb_url) as client:
        yield client


@pytest.fixture
def mongo_celery_emptied(pytestconfig: pytest.Config, mongo_celery_client: MongoClient[dict[str, Any]]) -> None:
    """Empty every collection of the session's own MongoDB, and keep its indexes; refused with a configured URL."""
    from mongo_celery.testing.processes import empty

    if given_url(pytestconfig, MONGODB):
        raise pytest.UsageError(
            f"mongo_celery_emptied removes all documents, and {MONGODB} names a server that may have others': empty "
            "your collections yourself, or unset it.",
        )
    empty(mongo_celery_client)


@pytest.fixture
def mongo_celery_bridges(pytestconfig: pytest.Config) -> list[Bridge]:
    """Give the bridges that `bridge_runner` runs; a suite whose factory makes them has a fixture of this name."""
    names = str(pytestconfig.getini(BRIDGE)).split()
    if not names:
        raise pytest.UsageError(
            f"bridge_runner does not know the bridge: set {BRIDGE} = shop.celery:bridge in pytest's configuration, or "
            "write a fixture mongo_celery_bridges that returns a list of them.",
        )
    return [_bridge_named(name) for name in names]


@pytest.fixture
def bridge_runner(mongo_celery_bridges: list[Bridge], mongo_celery_mongodb_url: str) -> Iterator[BridgeRunner]:
    """Give a `BridgeRunner` of the suite's bridges: what the test writes from now on, `deliver()` delivers."""
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


def given_url(config: pytest.Config, option: str) -> str:
    """A configured URL, of this process of xdist; empty where there is none."""
    url, worker = str(config.getini(option)), getattr(config, "workerinput", None)
    if url and worker is not None and WORKER not in url:
        raise pytest.UsageError(
            f"several processes of xdist would share the data behind {option}: write {WORKER} where each is to have "
            "its own, such as the database's name, or unset it, so that each starts a server of its own.",
        )
    return url.replace(WORKER, worker["workerid"] if worker is not None else "main")


def _bridge_named(name: str) -> Bridge:
    """The bridge that the configuration names as `module:name`."""
    import importlib

    from mongo_celery import Bridge

    module, colon, attribute = name.partition(":")
    if not colon:
        raise pytest.UsageError(f"{BRIDGE} = {name}: write it as module:name, such as shop.celery:bridge.")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of the module's own imports
        raise pytest.UsageError(
            f"{BRIDGE} = {name}: there is no module {error.name}. Install the project, or set pythonpath = . in "
            "pytest's configuration, which is the directory of the packages.",
        ) from None
    if not isinstance(found, Bridge):
        what = f"no {attribute}" if found is None else f"a {type(found).__name__} of this name"
        raise pytest.UsageError(f"{BRIDGE} = {name}: the module {module} has {what}, and a Bridge is needed.")
    return found
