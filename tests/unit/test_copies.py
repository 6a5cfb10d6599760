"""The checks of copies catch bad histories, and let good ones pass."""

from __future__ import annotations

import pytest

from tests.acceptance.copies import Copied, different, too_often, undelivered, went_back

GOOD = [
    Copied("a", 1, seq=1, fence=1),
    Copied("b", 4, partition=1, seq=1, fence=9),
    Copied("a", 3, seq=2, fence=2),
    Copied("a", None),
    Copied("a", None),
    Copied("a", 5, seq=4, fence=3),
    Copied("a", 5, seq=4, fence=4),
]
REPEATED = [
    Copied("a", 3, seq=7, fence=5),
    Copied("a", 4, seq=8, fence=5),
    Copied("a", None),
    Copied("a", 3, seq=7, fence=6),
    Copied("a", 4, seq=8, fence=6),
]


def test_what_goes_forward_is_good() -> None:
    """Numbers may be left out, since a snapshot has the newest state only, and the same one may come again."""
    assert went_back(GOOD, repeats=False) == []


@pytest.mark.parametrize(
    "late",
    [
        Copied("a", 2, seq=3, fence=3),
        Copied("a", 2, seq=3, fence=1),
        Copied("a", 2, seq=2, fence=2),
    ],
    ids=["a document of the snapshot behind its successor", "under an older token", "again under the same token"],
)
def test_an_older_document_over_a_newer_one_is_found(late: Copied) -> None:
    """P2: as when a chunk is appended behind changes that are newer than it."""
    history = [Copied("a", 1, seq=1, fence=1), Copied("a", 3, seq=2, fence=2), late]
    assert went_back(history) == [f"a went back from 3 to 2, by number {late.seq}"]


def test_what_was_deleted_and_comes_back_is_found() -> None:
    """P2: the same number again is older than the delete; what is written later is not."""
    history = [Copied("a", 1, seq=1, fence=1), Copied("a", None)]
    assert went_back([*history, Copied("a", 1, seq=3, fence=2)]) == ["a went back from 1.5 to 1, by number 3"]
    assert went_back([*history, Copied("a", 3, seq=3, fence=2)]) == []


def test_a_run_that_was_cut_may_be_repeated_and_a_transaction_may_not() -> None:
    """P2: from its beginning, under a larger token; effects that are single leave no way back."""
    assert went_back(REPEATED) == []
    assert went_back(REPEATED, repeats=False) == ["a went back from 4.5 to 3, by number 7"]


def test_a_repetition_in_another_partition_excuses_nothing() -> None:
    """F3: tokens of different partitions do not compare."""
    history = [
        Copied("b", 1, partition=1, seq=9, fence=1),
        Copied("a", 2, seq=1, fence=2),
        Copied("a", 1, seq=2, fence=3),
    ]
    assert went_back(history) == ["a went back from 2 to 1, by number 2"]


def test_what_is_missing_too_much_or_different_in_a_copy_is_found() -> None:
    """P1: each key that differs is named."""
    assert different({"a": b"1"}, {"a": b"1"}) == []
    assert different({"a": b"1", "b": b"2"}, {"b": b"3", "c": b"4"}) == [
        "a is not there in the copy, b'1' in the source",
        "b is b'3' in the copy, b'2' in the source",
        "c is b'4' in the copy, not there in the source",
    ]


def test_what_was_never_delivered_or_only_as_it_was_before_is_found() -> None:
    """P1: also the end of a document."""
    assert undelivered({"a": 1.0, "b": 2.5}, {"a": 1.0, "b": 2.5, "c": 9.0}) == []
    assert undelivered({"a": 1.0, "b": 2.5}, {"b": 2.0}) == [
        "a was delivered as 0, 1 is owed",
        "b was delivered as 2, 2.5 is owed",
    ]


def test_what_is_read_oftener_than_faults_explain_is_found() -> None:
    """P6: one more for each fault."""
    assert too_often({"a": 3, "b": 1}, 2) == []
    assert too_often({}, 0) == []
    assert too_often({"a": 3, "b": 1}, 1) == ["a was delivered 3 times beside 1 faults"]
