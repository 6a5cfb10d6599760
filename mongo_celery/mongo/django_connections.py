"""The transactions that Django's own `atomic` has open in this thread, with django-mongodb-backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def connections_in_transaction() -> Iterator[Any]:
    """Yield Django's connections whose `session` is in a transaction; imports nothing of Django."""
    if "django_mongodb_backend.base" in sys.modules:
        from django.db import connections

        for connection in connections.all(initialized_only=True):
            session = getattr(connection, "session", None)
            if session is not None and session.in_transaction:
                yield connection
