"""Whether a worker was told to end is known of each worker, not of its process."""

from __future__ import annotations

import signal

import pytest
from celery import Celery, signals

from mongo_celery.bridge.worker.departure import is_leaving, is_sent_away


def test_a_second_worker_of_a_process_was_not_told_what_the_first_was() -> None:
    """P14: else nothing that kills its handlers would ever count."""
    assert not is_leaving()
    try:
        signals.worker_shutting_down.send(sender="first")
        assert is_leaving()
    finally:
        signals.worker_init.send(sender="second")
    assert not is_leaving()


@pytest.mark.parametrize(
    ("error", "seconds", "is_away"),
    [
        (SystemExit(signal.SIGTERM - 256), 5, True),  # as billiard ends a child by a signal
        (SystemExit(signal.SIGQUIT - 256), 5, True),
        (SystemExit(signal.SIGTERM - 256), 60, False),  # a hard time limit sends the same signal
        (SystemExit(3), 5, False),
        (SystemExit("bye"), 5, False),
        (KeyboardInterrupt(), 5, False),
    ],
)
def test_a_signal_from_outside_is_told_from_what_a_handler_does(
    error: BaseException, seconds: float, is_away: bool
) -> None:
    """P14, and nothing that ends its own process runs for ever uncounted."""

    @Celery("shop", set_as_current=False).task(bind=True, shared=False, time_limit=60)
    def handle(_task: object) -> None:
        assert is_sent_away(error, seconds) is is_away

    assert handle.apply(throw=True).successful()
