"""What every code of the server means to us, number by number, and against the driver's own lists."""

from __future__ import annotations

import pytest
from pymongo import errors as driver

from mongo_celery.bridge.stream.reactions import Reaction, reaction_to
from mongo_celery.mongo.verdicts import is_transient

CODES = range(60_000)
"""All numbers that the server gives: its own names end below 500, assertions of the parser begin at 10 000."""

TRANSIENT = {
    6, 7, 43, 50, 63, 89, 91, 112, 133, 134, 150, 175, 189, 211, 216, 234, 237, 248, 262, 346, 365, 384, 9001, 10107,
    11600, 11601, 11602, 13388, 13435, 13436, 51144,
}  # fmt: skip
REACTIONS = {
    Reaction.REOPEN: TRANSIENT,
    Reaction.REOPEN_BY_TIME: {280},
    Reaction.HISTORY_LOST: {136, 260, 286},
    Reaction.TOPOLOGY: {20, 40573},
    Reaction.ACCESS: {13, 18, 8000},
    Reaction.UNREADABLE: {47, 10334, 17419, 17420, 51075},
    Reaction.REFUSED: {2, 9, 14, 15, 17, 72, 73, 168, 193, 40324, 40415, 40647, 50811, 51058},
}
FIRST_LOCATION = 10_000


def refused(code: int | None, message: str = "no", *labels: str) -> driver.OperationFailure:
    return driver.OperationFailure(message, code, {"errmsg": message, "errorLabels": list(labels)})


def expected(code: int, *, opening: bool) -> Reaction:
    unknown = Reaction.REFUSED if opening and code >= FIRST_LOCATION else Reaction.UNKNOWN
    return next((reaction for reaction, codes in REACTIONS.items() if code in codes), unknown)


@pytest.mark.parametrize("opening", [True, False], ids=["opening", "reading"])
def test_every_number_has_the_reaction_of_its_kind(opening: bool) -> None:
    """P9: a number that is moved from one kind to another is moved on purpose."""
    found = {code: reaction_to(refused(code), opening=opening) for code in CODES}
    assert found == {code: expected(code, opening=opening) for code in CODES}


def test_every_number_that_may_pass_is_known_as_such() -> None:
    """P9: and no other is repeated."""
    assert {code for code in CODES if is_transient(refused(code))} == TRANSIENT
