"""Whether a worker was told to end is known of each worker, not of its process."""

from __future__ import annotations

from celery import signals

from mongo_celery.bridge.worker.departure import is_leaving


def test_a_second_worker_of_a_process_was_not_told_what_the_first_was() -> None:
    """P14: else nothing that kills its handlers would ever count."""
    assert not is_leaving()
    try:
        signals.worker_shutting_down.send(sender="first")
        assert is_leaving()
    finally:
        signals.worker_init.send(sender="second")
    assert not is_leaving()
