"""What `docs/logs.md` shows: a LOGGING whose lines have a time, and that lets the records of level info through."""

from __future__ import annotations

import io
import logging
import logging.config
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Nothing; afterwards it is used, as Django does."""
    del mongo_url, redis_url
    namespace: dict[str, Any] = {}
    yield namespace
    written = io.StringIO()
    with redirect_stderr(written):
        logging.config.dictConfig(namespace["LOGGING"])
        logging.getLogger("mongo_celery.listener").info("lease released")
        logging.getLogger("kombu").info("not asked for")
    assert written.getvalue().endswith("INFO mongo_celery.listener lease released\n"), written.getvalue()
    assert written.getvalue().startswith("20"), written.getvalue()
