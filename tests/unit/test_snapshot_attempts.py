"""The next attempt at a chunk of a snapshot: how many rows it has, and when the snapshot has failed."""

from __future__ import annotations

import time

from pymongo.errors import AutoReconnect, OperationFailure

from mongo_celery.bridge.listener.chunks import ROWS, ChunkFailedError
from mongo_celery.bridge.listener.snapshot_thread import ATTEMPTS_MAX, PAUSES, Attempts

BUSY = OperationFailure("busy", 50)


def test_where_reading_fails_the_next_attempt_comes_later_with_less() -> None:
    """However long the server lets it wait."""
    attempts = Attempts()
    for number in range(1, 15):
        attempts.note_failure(BUSY, "busy")
        assert attempts.gate.opens_at - time.monotonic() >= PAUSES.first / 2
        assert (attempts.limit_rows(None), attempts.gate.failures) == (max(1, ROWS >> number), number)


def test_only_what_servers_answer_ends_a_snapshot() -> None:
    """An outage may last as long as it likes."""
    attempts, ended = Attempts(), list[bool]()
    reasons: list[Exception] = [AutoReconnect("no answer") for _ in range(3 * ATTEMPTS_MAX)]
    for why in reasons + [ChunkFailedError("blocked")] * ATTEMPTS_MAX:
        attempts.note_failure(why, "why")
        ended.append(attempts.errors >= ATTEMPTS_MAX)
    assert ended == [False] * (4 * ATTEMPTS_MAX - 1) + [True]


def test_a_rate_bounds_a_chunk() -> None:
    """So many documents a second."""
    attempts = Attempts()
    assert [attempts.limit_rows(rate) for rate in (None, 5.5, 0.1, 1e9)] == [ROWS, 5, 1, ROWS]


def test_what_has_worked_grows_step_by_step() -> None:
    """P17: where only some can be read in time, not every chunk begins with those that cannot."""
    attempts = Attempts()
    for _ in range(3):
        attempts.note_failure(BUSY, "busy")
    worked = attempts.limit_rows(None)
    after = attempts.after_success()
    assert worked < after.limit_rows(None) <= 2 * worked
    assert (after.errors, after.error, after.gate.is_open(time.monotonic())) == (0, None, True)
    for _ in range(20):
        after = after.after_success()
    assert after.limit_rows(None) == ROWS
    for _ in range(30):
        after.note_failure(BUSY, "busy")
    assert [after.limit_rows(None), after.after_success().limit_rows(None)] == [1, 2]
