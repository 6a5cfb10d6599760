"""Where locks and transactions end: a body that outlasts its limit, a holder that does, a lock error that is caught."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from mongo_celery.errors import DocumentLockedError, TransactionTimeoutError
from mongo_celery.locking import after_commit, select_for_update, transactional
from mongo_celery.mongo.transaction.scopes import scope_of
from tests.fixtures.process import wait_for
from tests.integration.locking_rig import GENEROUS, SHORT, Document, as_block_or_function, held, texts
from tests.rig.commands import CommandRecorder

Client = MongoClient[Document]
Notes = Collection[Document]
AS_BLOCK = pytest.mark.parametrize("as_block", [False, True])


def is_refused(notes: Notes) -> bool:
    """Return True when PyMongo sends nothing more within the limit."""
    try:
        notes.database.command("ping")
    except PyMongoError:
        return True
    return False


@AS_BLOCK
def test_a_body_that_outlasts_the_limit_is_aborted_and_frees_its_documents(
    notes: Notes, client: Client, sent: CommandRecorder, as_block: bool
) -> None:
    """No commit is tried that PyMongo would refuse to send: it would then not abort either, and the lock would stay."""
    notes.insert_one({"_id": 1, "text": "old"})
    committed: list[int] = []

    def body(session: ClientSession) -> None:
        after_commit(lambda: committed.append(1), session)
        select_for_update(notes, {"_id": 1}, session=session)
        notes.update_one({"_id": 1}, {"$set": {"text": "new"}}, session=session)
        wait_for(lambda: is_refused(notes))

    with pytest.raises(TransactionTimeoutError) as caught:
        as_block_or_function(client, body, as_block=as_block, timeout=SHORT)
    assert vars(caught.value)["outcome"] == "aborted"
    assert (len(sent.named("abortTransaction")), len(sent.named("commitTransaction"))) == (1, 0)
    assert notes.find_one() == {"_id": 1, "text": "old"}
    assert transactional(client)(select_for_update)(notes, {"_id": 1}, nowait=True)
    assert committed == []


def test_no_commit_is_tried_in_the_last_milliseconds(notes: Notes, client: Client, sent: CommandRecorder) -> None:
    """PyMongo might refuse to send it. After that it would not abort, and the documents would stay locked."""

    def body(session: ClientSession) -> None:
        notes.insert_one({}, session=session)
        scope = scope_of(session)
        assert scope is not None
        scope.deadline = time.monotonic() + 0.009

    with pytest.raises(TransactionTimeoutError):
        transactional(client).run(body)
    assert (len(sent.named("abortTransaction")), len(sent.named("commitTransaction"))) == (1, 0)


def raise_another(_notes: Notes, _session: ClientSession) -> None:
    raise LookupError("busy") from None


LOCKED: Any = pytest.raises(DocumentLockedError)


@AS_BLOCK
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda _notes, _session: "busy", LOCKED),
        (lambda notes, session: notes.insert_one({"text": "to be repeated"}, session=session), LOCKED),
        (raise_another, pytest.raises(LookupError)),
        (lambda _notes, session: session.abort_transaction(), nullcontext()),
    ],
    ids=["returns", "writes", "raises another", "ends it"],
)
def test_a_lock_error_that_is_caught_inside_ends_the_transaction_all_the_same(
    notes: Notes, client: Client, as_block: bool, answer: Callable[..., Any], expected: AbstractContextManager[object]
) -> None:
    """The server has aborted it: it can neither be committed, nor does a repetition help. An own error passes."""
    notes.insert_one({"_id": 1, "text": "held"})
    runs: list[int] = []

    def body(session: ClientSession) -> Any:
        runs.append(1)
        notes.insert_one({"text": "before"}, session=session)
        try:
            select_for_update(notes, {"_id": 1}, session=session, nowait=True)
        except DocumentLockedError:
            answer(notes, session)

    with held(notes, 1), expected:
        as_block_or_function(client, body, as_block=as_block, timeout=GENEROUS)
    assert (len(runs), texts(notes)) == (1, ["held"])
    as_block_or_function(client, body, as_block=as_block, timeout=GENEROUS)
    assert texts(notes) == ["held", "before"]
