"""The private names of PyMongo that the package uses."""

from __future__ import annotations

from typing import Any

from pymongo import MongoClient

from mongo_celery.mongo.driver_internals import hide_transaction, prevent_commit, replace_connections, show_transaction


def test_this_version_of_pymongo_has_every_private_name_that_is_used() -> None:
    """
    No server is needed. A line that fails says what breaks with this version.

    The effects are tested where they are needed: `test_inside_a_transaction`, `test_transactional_functions`,
    `test_twophase_inside` and `test_unready_members`.
    """
    with MongoClient[dict[str, Any]]("mongodb://localhost:1", connect=False) as client:
        # Else a leader or worker keeps a connection that refuses sessions, until it is restarted.
        replace_connections(client)
        with client.start_session() as session:
            session.start_transaction()
            # Else a forked child, or a coroutine that is thrown away, aborts the transaction of somebody else.
            state = hide_transaction(session)
            seen = [session.in_transaction]
            show_transaction(session, state)
            seen.append(session.in_transaction)
            # Else a transaction of the driver or of Django commits half of a payment that has failed.
            prevent_commit(session)
            seen.append(session.in_transaction)
            hide_transaction(session)
    assert seen == [False, True, True]
