"""A listener in a thread of this process, over real servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mongo_celery import Bridge
from mongo_celery.bridge.listener.listener import Listener
from tests.fixtures.process import PATIENCE_SECONDS


@contextmanager
def listening(bridge: Bridge) -> Iterator[None]:
    listener = Listener(bridge.wiring)
    thread = threading.Thread(target=listener.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.stop()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "it ends"
