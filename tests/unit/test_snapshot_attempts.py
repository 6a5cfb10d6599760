"""The attempts at a chunk of a snapshot: when the snapshot has failed."""

from __future__ import annotations

from pymongo.errors import AutoReconnect

from mongo_celery.bridge.listener.chunks import ChunkFailedError
from mongo_celery.bridge.listener.snapshot_thread import ATTEMPTS_MAX, Attempts


def test_only_what_servers_answer_ends_a_snapshot() -> None:
    """An outage may last as long as it likes."""
    attempts, ended = Attempts(), list[bool]()
    reasons: list[Exception] = [AutoReconnect("no answer") for _ in range(3 * ATTEMPTS_MAX)]
    for why in reasons + [ChunkFailedError("blocked")] * ATTEMPTS_MAX:
        attempts.note_failure(why, "why")
        ended.append(attempts.errors >= ATTEMPTS_MAX)
    assert ended == [False] * (4 * ATTEMPTS_MAX - 1) + [True]
