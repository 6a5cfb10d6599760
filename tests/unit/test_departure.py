"""Whether a worker was told to end, and children of one that was killed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from celery import signals

from mongo_celery.bridge.worker.departure import is_leaving

_POOL = """
import os, sys
from celery import signals
import mongo_celery.bridge.worker.departure

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


@pytest.mark.parametrize(("worker", "shown"), [("killed", ""), ("alive", "serves\n"), ("same process", "serves\n")])
def test_a_child_whose_worker_was_killed_before_it_was_ready_ends(worker: str, shown: str) -> None:
    """Celery asks the kernel for a signal at its worker's death, which is too late where that was before."""
    # All that has the output open has ended when this returns.
    done = subprocess.run([sys.executable, "-c", _POOL, worker], capture_output=True, text=True, check=True)
    assert done.stdout == shown, done.stderr
