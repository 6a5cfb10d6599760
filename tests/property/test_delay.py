"""The delay of a handler against what it promises, second by second, for changes at any times and of any keys."""

from __future__ import annotations

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mongo_celery.bridge.listener.delay import Delay
from mongo_celery.bridge.options import LONGEST_BURST, SPLIT_BURST
from mongo_celery.bridge.state.backlog import StoredChange

BEGIN, AHEAD = 1000, 500.0
"""The time of the first change, and by how much the server's clock is ahead of that of the process."""

changes = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=12)

turns = st.sets(st.integers(1, 40))


def make_changes(steps: list[tuple[int, int]]) -> tuple[list[float], list[StoredChange]]:
    """Return the times at which the seconds of changes end, and the changes, by the seconds between them and keys."""
    times, found, time = list[float](), list[StoredChange](), BEGIN
    for number, (later, key) in enumerate(steps):
        time += later
        times.append(time + 1.0)
        found.append(StoredChange(f"82{time:08X}{number:08X}", hash=key))
    return times, found


@settings(max_examples=300)
@given(changes, st.integers(1, 4), st.booleans(), st.integers(1, 6), st.booleans(), turns, turns)
@example([(1, 0)] * 20, 1, True, 20, False, set(), set())  # never quiet
def test_each_change_runs_after_its_delay_and_within_its_bounds(
    steps: list[tuple[int, int]],
    seconds: int,
    coalesces: bool,
    length: int,
    is_behind: bool,
    take_overs: set[int],
    crashes: set[int],
) -> None:
    """
    P6, P10, P17: never sooner, not before its key is quiet or has waited for long, and never later than that.

    Also where a new term reads again from the position, and where a worker dies, so that its run is repeated.
    """
    times, stream = make_changes(steps)
    delay, committed, server, turn = Delay(seconds, coalesces=coalesces), 0, float(BEGIN), 0
    while committed < len(stream):
        server, turn = server + 0.5, turn + 1
        now = server - AHEAD
        last_read = sum(time <= server for time in times)
        unread = int(is_behind and committed + 1 < last_read < len(stream))
        if turn in take_overs:
            delay, unread = Delay(seconds, coalesces=coalesces), max(last_read - committed - 1, 0)
            assert not delay.count_due(stream, now)[0], "it does not know the server's time"
        read_to = times[last_read - unread - 1] if unread else math.inf
        known = stream[committed : min(last_read - unread, committed + length)]
        delay.observe(AHEAD, read_to)
        if not known:
            continue
        count, next_at = delay.count_due(known, now)
        due = [place for place in range(committed, committed + len(known)) if times[place] + seconds <= server]
        assert count <= len(due)
        last = {each.hash: committed + place for place, each in enumerate(known)}
        reached = min(server, read_to) if coalesces else server
        waited = reached - times[committed]
        quiet = [key for key, place in last.items() if times[place] + seconds <= reached]
        if not count:
            assert next_at > now
            assert not delay.count_due(known, (now + next_at) / 2)[0], "whoever asks again then is not late"
            assert waited < (LONGEST_BURST if coalesces else 1) * seconds
            assert waited < SPLIT_BURST * seconds or stream[committed].hash not in quiet
            continue
        for each in known[:count] if coalesces else ():
            assert each.hash in quiet or waited >= LONGEST_BURST * seconds
            assert last[each.hash] < committed + count or waited >= SPLIT_BURST * seconds
        if not coalesces:
            assert count == len(due)
        committed += count * (turn not in crashes)
