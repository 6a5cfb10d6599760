"""
The lines that a listener writes: each with a time, whatever has set up logging.

Celery's own setup gives every line a time. A project that keeps its own (Django's `LOGGING` with
`worker_hijack_root_logger=False`, or a receiver of `setup_logging`) may have handlers without any, which is of little
use in the log of a process that runs for weeks; and `dictConfig` disables every logger that it does not know, so that
nothing at all is said. A formatter that is more than a format string (JSON, say) is left alone, and so are handlers
that are no streams: what syslog and journals receive has a time of its own. Levels stay as they were set.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from celery import Celery

_NAME = "mongo_celery"


class _Timed(logging.Formatter):
    """The lines of another formatter behind the time."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return f"[{self.formatTime(record)}] {self._inner.format(record)}"


def give_lines_a_time(app: Celery) -> None:
    """To be called once logging is set up: whatever writes the listener's records to a stream writes their time."""
    plain = logging.Formatter(app.conf.worker_log_format)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == _NAME and isinstance(logger, logging.Logger):
            logger.disabled = False
    handlers = list(_handlers())
    if not handlers:  # Python's last resort has no time either, and drops all but warnings
        handlers = [logging.StreamHandler()]
        logging.getLogger(_NAME).addHandler(handlers[0])
    for handler in handlers:
        formatter = handler.formatter
        if not isinstance(handler, logging.StreamHandler):
            continue
        if formatter is None:
            handler.setFormatter(plain)
        elif type(formatter) is logging.Formatter and not formatter.usesTime():
            handler.setFormatter(_Timed(formatter))


def _handlers() -> Iterator[logging.Handler]:
    """What receives the records of our loggers."""
    logger: logging.Logger | None = logging.getLogger(_NAME)
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None
