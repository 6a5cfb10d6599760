"""The parts of a run against what they promise, for every handler that fails somewhere, with coalescing and without."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from mongo_celery.bridge.worker.parts import Parts

documents = st.lists(st.sampled_from([b"a", b"b", b"c", None]), min_size=1, max_size=12)


class Driver:
    """A handler of lists that fails on some changes, and the execution that gives them, in a few lines."""

    def __init__(self, parts: Parts, bad: set[int], *, tells: bool, stops_at: int | None = None) -> None:
        self.calls: list[list[int]] = []
        self.done: list[int] = []
        self._parts = parts
        self._bad = bad
        self._tells = tells
        self._stops_at = stops_at

    def drive(self) -> int | None:
        """Give everything; the change that has failed, if one has."""
        parts = self._parts
        while True:
            if parts.failed is not None and not parts.list_remaining(parts.failed):
                return parts.failed
            if not parts.has_more:
                return None
            given = parts.next_offsets()
            assert given == sorted(set(given)), "in order, each once"
            assert all(parts.begin <= each < parts.end for each in given)
            self.calls.append(given)
            place = next((at for at, each in enumerate(given) if each in self._bad), None)
            if place is None:
                self._finish(given)
            elif self._tells or len(given) == 1:
                parts.finish(given[:place])
                self.done += given[:place]
                parts.fail(given[place])
            else:
                parts.split(given)

    def _finish(self, given: Sequence[int]) -> None:
        stop = self._stops_at
        if stop is not None and any(each >= stop for each in given) and not self._parts.is_closing and given[0] < stop:
            count = next(at for at, each in enumerate(given) if each >= stop)
            self._parts.finish(given[:count])
            self.done += given[:count]
            self._parts.stop(given[count])
            return
        self.done += given
        self._parts.complete()


def _last(of: Sequence[bytes | None], upto: int) -> set[int]:
    """What must have been given before an offset: each last change of a document in front of the next event without."""
    found, seen = set[int](), set[bytes]()
    for each in reversed(range(upto)):
        document = of[each]
        if document is None:
            seen.clear()
        elif document in seen:
            continue
        else:
            seen.add(document)
        found.add(each)
    return found


@settings(max_examples=300)
@given(documents, st.sets(st.integers(0, 11)), st.booleans(), st.booleans(), st.booleans(), st.integers(1, 12))
def test_what_fails_is_found_with_all_before_it_done(
    of: list[bytes | None], bad: set[int], tells: bool, coalesces: bool, head_alone: bool, most: int
) -> None:
    """P2, P6: exactly one change is charged, the first that cannot be done; nothing before it is left behind."""
    parts = Parts(len(of), of if coalesces else None, most=most, head_alone=head_alone)
    driver = Driver(parts, bad, tells=tells)
    failed = driver.drive()
    assert all(len(call) <= most for call in driver.calls)

    assert failed is None or failed in bad
    end = len(of) if failed is None else failed
    owed = _last(of, end) if coalesces else set(range(end))
    if failed is not None and coalesces:
        owed -= set(parts.list_superseded(failed))
    assert owed <= {*driver.done, *range(parts.begin)}
    assert all(each not in bad for each in driver.done)
    assert all(each < end for each in driver.done)
    if tells:
        assert len(driver.done) == len(set(driver.done)), "what the handler has finished is not repeated"
    if not coalesces:
        assert failed == next((each for each in range(len(of)) if each in bad), None)


@settings(max_examples=200)
@given(documents, st.integers(1, 12))
def test_a_run_that_ends_early_leaves_nothing_behind(of: list[bytes | None], stop: int) -> None:
    """P2: what was passed over for a change that is not given any more is given itself."""
    parts = Parts(len(of), of)
    driver = Driver(parts, set(), tells=True, stops_at=stop)
    assert driver.drive() is None
    assert _last(of, parts.begin) <= set(driver.done)
    assert len(driver.done) == len(set(driver.done))


@settings(max_examples=200)
@given(st.integers(1, 600), st.integers(0, 599))
def test_halving_takes_a_logarithm_of_calls(count: int, bad: int) -> None:
    """A list of hundreds is not given hundreds of times to find one change."""
    driver = Driver(Parts(count), {bad}, tells=False)
    assert driver.drive() == (bad if bad < count else None)
    assert len(driver.calls) <= 2 * count.bit_length() + 1


def test_a_change_that_was_tried_before_is_given_alone() -> None:
    """Its attempts are its own: no other change is in a list that fails again."""
    parts = Parts(4, head_alone=True)
    assert parts.next_offsets() == [0]
    parts.complete()
    assert parts.next_offsets() == [1, 2, 3]


def test_a_change_stands_for_those_of_its_document_up_to_an_event_without_one() -> None:
    """A drop parts what was before it from what comes later."""
    parts = Parts(6, [b"a", None, b"a", b"b", b"a", b"b"])
    assert parts.next_offsets() == [0, 1, 4, 5]
    assert parts.list_superseded(4) == [2]
    assert parts.list_superseded(5) == [3]
    assert parts.list_superseded(1) == []


@settings(max_examples=200)
@given(documents, st.sets(st.integers(0, 11)), st.integers(0, 12), st.booleans())
def test_where_a_run_could_end_is_known_by_what_is_owed_there(
    of: list[bytes | None], finished: set[int], calls: int, coalesces: bool
) -> None:
    """P2: as late as can be with so many more calls; with one it always gets on."""
    parts = Parts(len(of), of if coalesces else None)
    parts.finish([*finished])
    owed = [(_last(of, end) if coalesces else set(range(end))) - finished for end in range(len(of) + 1)]
    end = parts.reach(calls)
    assert end == max(each for each in range(len(of) + 1) if len(owed[each]) <= calls)
    assert end or not calls
    parts.stop(end)
    assert parts.next_offsets() == sorted(owed[end]) if end else not parts.has_more


@settings(max_examples=200)
@given(documents)
def test_what_is_recorded_inside_of_a_part_changes_nothing_that_is_given(of: list[bytes | None]) -> None:
    """P2: the position follows as far as nothing is left behind it, and each is given once."""
    parts, whole = Parts(len(of), of), Parts(len(of), of).next_offsets()
    done: list[int] = []
    while given := parts.next_offsets():
        done.append(given[0])
        parts.finish(given[:1])
        assert _last(of, parts.reach(0)) <= set(done)
        parts.begin = parts.reach(0)
    assert (done, parts.begin) == (whole, len(of))
