"""How large the next chunk of a snapshot is, and when it may begin: what harms others least, and still gets on."""

from __future__ import annotations

from typing import Any, cast

from pymongo.errors import AutoReconnect, OperationFailure

from mongo_celery.bridge.listener.chunks import Chunk, ChunkFailedError
from mongo_celery.bridge.listener.pace import ATTEMPTS_MAX, FIRST_SIZE, LARGEST_SIZE, PAUSES, ChunkPace
from mongo_celery.bridge.state.snapshots import Snapshot

BUSY = OperationFailure("busy", 50)
ROOM = 1000


def chunk(pace: ChunkPace, *, rate: float | None = None, **given: Any) -> Chunk:
    """The next chunk, as it was read or handled."""
    snapshot = Snapshot(id="shop/copy/a", subscription="copy", source="a.b", rate=rate)
    return Chunk(snapshot, cast("Any", None), pace.limit_size(rate), sent_at=100.0, **given)


def test_chunks_grow_while_their_own_part_is_quick_whatever_was_in_front_of_them() -> None:
    """Beside writers that keep everybody busy, a chunk waits long for its turn; that is not its own time."""
    pace = ChunkPace(FIRST_SIZE)
    for _ in range(10):
        pace.note_handled(chunk(pace, first_at={0: 190.0, 1: 130.0}, seconds=0.4))
    assert pace.size == LARGEST_SIZE


def test_chunks_of_which_a_partition_takes_long_become_smaller() -> None:
    """What comes behind them waits for it."""
    pace = ChunkPace(FIRST_SIZE * 4)
    pace.note_handled(chunk(pace, seconds=3.0))
    assert pace.size == FIRST_SIZE * 4, "neither quick nor slow"
    pace.note_handled(chunk(pace, seconds=7.0))
    assert pace.size == FIRST_SIZE * 2


def test_where_reading_fails_the_next_attempt_comes_later_with_less() -> None:
    """However long the server lets it wait."""
    pace = ChunkPace(FIRST_SIZE)
    for number in range(1, 6):
        pause = pace.note_failure(BUSY, "busy", pace.size, 1000.0)
        assert pause >= PAUSES.first / 2
        assert pace.ready_at == 1000.0 + pause
        assert (pace.size, pace.failures) == (max(1, FIRST_SIZE >> number), number)


def test_only_what_servers_answer_ends_a_snapshot() -> None:
    """An outage may last as long as it likes; a chunk that is read forgets all failures."""
    pace, ended = ChunkPace(FIRST_SIZE), []
    reasons: list[Exception] = [AutoReconnect("no answer")] * 3 * ATTEMPTS_MAX + [
        ChunkFailedError("blocked")
    ] * ATTEMPTS_MAX
    for why in reasons:
        pace.note_failure(why, "why", pace.size, 0.0)
        ended.append(pace.is_hopeless)
    assert ended == [False] * (4 * ATTEMPTS_MAX - 1) + [True]
    pace.note_read(chunk(pace, weight=1), ROOM)
    assert pace == ChunkPace(1, ready_at=pace.ready_at)


def test_a_chunk_has_room() -> None:
    """Too many bytes: the next one has less."""
    pace = ChunkPace(400)
    pace.note_read(chunk(pace, weight=4 * ROOM), ROOM)
    assert pace.size == 100


def test_a_rate_bounds_a_chunk_and_puts_the_next_one_off() -> None:
    """So many documents a second, from the begin of one to the begin of the next."""
    pace = ChunkPace(FIRST_SIZE)
    assert (pace.limit_size(None), pace.limit_size(5.5), pace.limit_size(0.1)) == (FIRST_SIZE, 5, 1)
    pace.note_handled(chunk(pace, rate=4.0, count=4))
    assert pace.ready_at == 101.0
