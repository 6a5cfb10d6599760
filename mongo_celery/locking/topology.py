"""What a standalone server says to a transaction, in words that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pymongo.errors import OperationFailure

from mongo_celery.errors import TopologyError

_ILLEGAL_OPERATION = 20


def explain(error: BaseException) -> None:
    """Raise TopologyError if the error is a standalone server's refusal of a transaction; else do nothing."""
    # The code alone has many meanings; only this one names a replica set and mongos.
    if getattr(error, "code", None) == _ILLEGAL_OPERATION and "replica set member or mongos" in str(error):
        raise TopologyError(
            "Transactions need a replica set or a sharded cluster. Start mongod with `--replSet` and run "
            "`rs.initiate()`; a set of one member is enough.",
        ) from error


@contextmanager
def explained() -> Iterator[None]:
    """Raise TopologyError where a standalone server refuses the first operation of a transaction."""
    try:
        yield
    except OperationFailure as error:
        explain(error)
        raise
