"""What every code of the server means to us, number by number, and against the driver's own lists."""

from __future__ import annotations

import re

import pytest
from bson.errors import InvalidDocument
from pymongo import errors as driver
from pymongo import helpers_shared
from pymongo.synchronous import bulk, change_stream, client_session

from mongo_celery.bridge.stream.verdicts import judge_stream_error
from mongo_celery.mongo.verdicts import Verdict, is_duplicate_id, is_too_large, is_transient

NUMBERS = [*range(1_000), *range(8_000, 18_000), *range(40_000, 41_000), *range(50_000, 52_000)]
"""Where the server's numbers are: its names end below 500, assertions of the parser begin at 10 000."""

TRANSIENT = {
    6, 7, 43, 50, 63, 89, 91, 112, 133, 134, 150, 175, 189, 211, 216, 234, 237, 248, 262, 346, 365, 384, 9001, 10107,
    11600, 11601, 11602, 13388, 13435, 13436, 51144,
}  # fmt: skip
OF_A_STREAM = {
    Verdict.TRANSIENT: TRANSIENT,
    Verdict.TOKEN_NOT_FOUND: {280},
    Verdict.HISTORY_LOST: {136, 260, 286},
    Verdict.TOPOLOGY: {20, 40573},
    Verdict.ACCESS: {13, 8000},
    Verdict.LOGIN: {18},
    Verdict.TOO_LARGE: {10334, 17419, 17420},
    Verdict.IMAGE_MISSING: {47, 51075},
    Verdict.REFUSED: {2, 9, 14, 15, 17, 72, 73, 166, 168, 193, 40324, 40415, 40647, 50811, 51058},
}
FIRST_LOCATION = 10_000


def refused(code: int | None, message: str = "no", *labels: str) -> driver.OperationFailure:
    return driver.OperationFailure(message, code, {"errmsg": message, "errorLabels": list(labels)})


def expected(code: int, *, opening: bool) -> Verdict:
    unknown = Verdict.REFUSED if opening and code >= FIRST_LOCATION else Verdict.UNKNOWN
    return next((verdict for verdict, codes in OF_A_STREAM.items() if code in codes), unknown)


@pytest.mark.parametrize("opening", [True, False], ids=["opening", "reading"])
def test_every_number_has_the_verdict_of_its_kind(opening: bool) -> None:
    """P9: a number that is moved from one kind to another is moved on purpose."""
    found = {code: judge_stream_error(refused(code), opening=opening) for code in NUMBERS}
    assert found == {code: expected(code, opening=opening) for code in NUMBERS}


def repeated_by_the_driver() -> set[int]:
    """Each code in a list of PyMongo's that it retries, resumes, or looks for another primary after."""
    lists = (
        value
        for module in (helpers_shared, change_stream, client_session, bulk)
        for name, value in vars(module).items()
        if re.fullmatch(r"_[A-Z_]+_(CODES|ERRORS)", name) and isinstance(value, frozenset)
    )
    return {code for codes in lists for code in codes}


RESUMED = {6, 7, 63, 89, 91, 133, 150, 189, 234, 262, 9001, 10107, 11600, 11602, 13388, 13435, 13436}
"""The drivers' specification of change streams: resumed after these where a server sets no label."""

OTHERWISE = {
    10058: "of servers before ours; PyMongo makes it a NotPrimaryError, which is transient by its class",
    64: "a time-out of the write concern: PyMongo makes it a WTimeoutError, which is transient by its class",
}


def test_whatever_the_driver_repeats_is_transient_for_us() -> None:
    """P9: a new release of PyMongo that knows one more code fails here, not in production."""
    listed = repeated_by_the_driver()
    assert {91, 189, 262, 11600, 10107} <= listed, "the lists are found"
    assert {code for code in listed | RESUMED if not is_transient(refused(code))} <= set(OTHERWISE)
    assert is_transient(driver.NotPrimaryError("stepped down"))
    assert is_transient(driver.WTimeoutError("majority", 64))


@pytest.mark.parametrize(
    ("error", "too_large"),
    [
        (refused(10334), True),
        (driver.WriteError("replacement", 17420), True),
        (driver.WriteError("object to insert too large", 2), True),
        (driver.WriteError("something else is wrong", 2), False),
        (driver.DocumentTooLarge("BSON document too large"), True),
        (InvalidDocument("not a document"), False),
    ],
    ids=str,
)
def test_a_document_beyond_the_limit_is_told_in_whatever_way(error: BaseException, too_large: bool) -> None:
    """The driver's class, the updates' numbers, and what an insert says with a code of many meanings."""
    assert is_too_large(error) is too_large


@pytest.mark.parametrize(("fields", "own"), [(["_id"], True), (["email"], False), (["_id", "email"], False)], ids=str)
def test_a_duplicate_id_is_told_from_another_unique_index(fields: list[str], own: bool) -> None:
    details = {"keyPattern": dict.fromkeys(fields, 1)}
    assert is_duplicate_id(driver.DuplicateKeyError("E11000", 11000, details)) is own
    assert not is_duplicate_id(refused(112))
