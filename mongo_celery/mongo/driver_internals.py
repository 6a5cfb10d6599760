"""
Operations on PyMongo's sessions and clients without a public API. Only this module uses their private names.

`tests/unit/test_driver_internals.py` fails if a PyMongo version lacks one of them, and names the consequence.
"""

from __future__ import annotations

from typing import Any

from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession


def replace_connections(client: MongoClient[Any] | AsyncMongoClient[Any]) -> None:
    """
    Make a client open new connections. A used one closes after its operation, so no operation fails.

    `close()` would end the client for all its users. A client that was never used has none.
    """
    topology: Any = client._topology  # noqa: SLF001
    if topology is None:  # the name of a `mongodb+srv://` URL is not resolved yet
        return
    for server in list(topology._servers.values()):  # noqa: SLF001
        server.pool.gen.inc(None)


def hide_transaction(session: ClientSession | AsyncClientSession) -> object:
    """Keep PyMongo's loops from aborting a session's transaction. Return the state for `show_transaction`."""
    transaction: Any = session._transaction  # noqa: SLF001
    state, transaction.state = transaction.state, None
    return state


def show_transaction(session: ClientSession | AsyncClientSession, state: object) -> None:
    """Restore a hidden transaction of a session."""
    transaction: Any = session._transaction  # noqa: SLF001
    transaction.state = state


def prevent_commit(session: ClientSession) -> None:
    """
    Make the server refuse the next statement and the commit of an open transaction with NoSuchTransaction.

    No server knows the session's next transaction number. If nothing was sent yet, the transaction counts as begun:
    otherwise the next statement would begin it. `abort_transaction` is not enough: later statements would run outside
    any transaction, and a `with` would succeed.
    """
    from pymongo.synchronous.client_session import _TxnState  # type: ignore[attr-defined]

    session._server_session.inc_transaction_id()  # noqa: SLF001
    session._transaction.state = _TxnState.IN_PROGRESS  # noqa: SLF001
