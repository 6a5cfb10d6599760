"""What `docs/apps.md` needs, and what is left of its apps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Nothing; its two apps reach their cluster, and one that is let go is gone."""
    del mongo_url, redis_url
    namespace: dict[str, Any] = {}
    yield namespace
    bridge = namespace["bridge"]
    gone = namespace.pop("second")
    for app in (namespace["first"], gone):
        assert bridge.of(app).client.admin.command("ping")["ok"]
    gone = weakref.ref(gone)
    del app
    gc.collect()
    assert gone() is None
    bridge.client.close()
