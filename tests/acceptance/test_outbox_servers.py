"""An outbox under servers that fork, load the application before they fork, or patch Python: gunicorn and gevent."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery.embedded.server import HOST, free_port
from tests.acceptance.outbox_rig import BEAT, Shop, Tap
from tests.fixtures.availability import skip_or_fail
from tests.fixtures.process import Processes, wait_for

Document = dict[str, Any]
KEYS = [f"key{number}" for number in range(6)]


@pytest.fixture
def shop(mongo_client: MongoClient[Document], mongo_url: str, tmp_path: Path, redis_url: str) -> Iterator[Shop]:
    for name in ("gunicorn", "gevent"):
        if find_spec(name) is None:
            skip_or_fail(f"{name} is not installed: pip install -e '.[dev]'")
    with Shop(Processes(tmp_path), mongo_client, mongo_url, redis_url, at_once=True) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "preload", "gthread", "gevent"])
def test_workers_of_gunicorn_deliver_what_they_write(shop: Shop, redis_url: str, kind: str) -> None:
    """Two processes, each with a dispatcher of its own: nobody sweeps before they have ended."""
    port = free_port()
    preload = ("--preload", "--env", "OUTBOX_BEFORE_FORK=1") if kind == "preload" else ()
    worker = ("-k", "sync" if kind == "preload" else kind, "-w", "2", *preload)
    server = shop.program(*worker, "-b", f"{HOST}:{port}", "tests.acceptance.outbox_project:web", module="gunicorn")
    server.wait_for_output(r"Booting worker[^$]*Booting worker")

    def write(key: str, *numbers: int) -> set[bytes]:
        urls = [f"http://{HOST}:{port}/{key}?{n}" for n in numbers]
        return {urllib.request.urlopen(url, timeout=60).read() for url in urls}

    with Tap(redis_url) as tap, ThreadPoolExecutor(len(KEYS)) as pool:
        answered: set[bytes] = set()
        for turn in range(100):
            answered |= set().union(*pool.map(lambda key, n=turn: write(key, n), KEYS))
            if len(answered) == 2:
                break
        assert len(answered) == 2, "both are at work"
        shop.agree(tap)
        for _ in pool.map(lambda key: write(key, *range(turn + 1, turn + 11)), KEYS):
            pass
        assert server.terminate() == 0
        assert "Traceback" not in server.text
        shop.outbox.runtime.at_once = False
        shop.sweep_all()
        shop.agree(tap)
    written = {key: list(range(turn + 11)) for key in KEYS}
    assert shop.committed() == written | ({"before": [1]} if preload else {})


@pytest.mark.slow
def test_a_worker_on_gevent_sweeps_and_runs_what_it_finds(shop: Shop) -> None:
    """Ten greenlets in one thread, so that the order of the runs is nobody's, and beat as a process of its own."""
    shop.outbox.runtime.at_once = False
    for key in KEYS:
        shop.insert(key, 1, 2, 3)
    shop.start("beat", *BEAT, "-l", "INFO")
    shop.consume(pool="gevent")
    wait_for(lambda: {key: sorted(ns) for key, ns in shop.effects().items()} == shop.committed())
    assert not shop.pending()
