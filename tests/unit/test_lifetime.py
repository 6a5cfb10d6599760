"""Whether a worker was told to end, and children of one that was killed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from celery import Celery, signals

from mongo_celery.bridge.worker.lifetime import describe_end, is_leaving, is_sent_away

_POOL = """
import os, sys
from celery import signals
import mongo_celery.bridge.worker.lifetime

signals.worker_init.send(sender=None)
if sys.argv[1] == "same process":
    signals.worker_process_init.send(sender=None)
    print("serves")
else:
    ours, theirs = os.pipe()
    worker = os.getpid()
    if os.fork():
        os.write(theirs, b"forked")
        os._exit(0) if sys.argv[1] == "killed" else os.wait()
    else:
        os.read(ours, 6)
        while sys.argv[1] == "killed" and os.getppid() == worker:
            pass
        signals.worker_process_init.send(sender=None)
        print("serves", flush=True)
        os._exit(0)
"""


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
    ("error", "seconds", "limit", "is_away", "words"),
    [
        (SystemExit(signal.SIGTERM - 256), 5, 60, True, "SIGTERM"),  # as billiard ends a child by a signal
        (SystemExit(signal.SIGQUIT - 256), 5, 60, True, "SIGQUIT"),
        (SystemExit(signal.SIGTERM - 256), 60, 60, False, "60 s"),  # a hard time limit sends the same signal
        (SystemExit(signal.SIGTERM - 256), 53.5, 60, False, "60 s"),  # its clock began before the task was called
        (SystemExit(signal.SIGTERM - 256), 0.8, 1, False, "1 s"),
        (SystemExit(40 - 256), 5, 60, True, "signal 40"),
        (SystemExit("bye"), 5, 60, False, "SystemExit: bye"),
        (KeyboardInterrupt(), 5, 60, False, "KeyboardInterrupt"),
    ],
)
def test_a_signal_from_outside_is_told_from_what_a_handler_does(
    error: BaseException, seconds: float, limit: int, is_away: bool, words: str
) -> None:
    """P14, and nothing that ends its own process runs for ever uncounted. P9: `SystemExit: -241` would be a riddle."""

    @Celery("shop", set_as_current=False).task(bind=True, shared=False, time_limit=limit)
    def handle(_task: object) -> None:
        assert is_sent_away(error, seconds) is is_away
        assert words in describe_end(error, seconds)

    assert handle.apply(throw=True).successful()


@pytest.mark.parametrize(("worker", "shown"), [("killed", ""), ("alive", "serves\n"), ("same process", "serves\n")])
def test_a_child_whose_worker_was_killed_before_it_was_ready_ends(worker: str, shown: str) -> None:
    """Celery asks the kernel for a signal at its worker's death, which is too late where that was before."""
    # All that has the output open has ended when this returns.
    done = subprocess.run([sys.executable, "-c", _POOL, worker], capture_output=True, text=True, check=True)
    assert done.stdout == shown, done.stderr
