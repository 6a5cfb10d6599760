"""Messages of another app's bridge of the same name: the listener's log reports what workers have counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from mongo_celery.bridge.state.drops import FOREIGN

logger = logging.getLogger("mongo_celery.listener")

_COMPLAINT_SECONDS = 30.0


class ForeignMessages:
    """Says in the listener's log, too, that workers have met messages of another app's bridge of this name."""

    def __init__(self) -> None:
        self._known: int | None = None
        self._said_at = -_COMPLAINT_SECONDS

    def notice(self, lease: Mapping[str, Any]) -> None:
        """Compare the count with that of the last reading; the first one says nothing of now."""
        count = (lease.get("dropped") or {}).get(FOREIGN, 0)
        if self._known is not None and count > self._known and time.monotonic() - self._said_at >= _COMPLAINT_SECONDS:
            self._said_at = time.monotonic()
            logger.error(
                "another app uses this bridge's name on this broker, with a state database of its own: workers have "
                "dropped %d of its messages so far, the last sent by %s. Give each bridge a name of its own with "
                "name='...', or each app a broker database of its own",
                count,
                lease.get("foreignSender") or "an unknown listener",
                extra={"event": "foreign_messages"},
            )
        self._known = count
