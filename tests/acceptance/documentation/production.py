"""What `docs/production.md` needs: the addresses, as variables of the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Nothing but both variables."""
    os.environ.update(BROKER_URL=redis_url, MONGODB_URL=mongo_url)
    namespace: dict[str, Any] = {}
    yield namespace

    bridge = namespace["bridge"]
    assert (bridge.name, bridge.url, bridge.options.start_from) == ("shop", mongo_url, "now")
    assert bridge.client.admin.command("ping")["ok"]
