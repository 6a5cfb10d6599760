"""
Every error that mongo_celery raises, in one tree.

::

    MongoCeleryError
     +-- ConfigurationError            an option, a source or a handler is wrong
     |    +-- ForkedClientError        a MongoClient crossed a fork
     +-- DeploymentError               MongoDB cannot serve a bridge as it is
     |    +-- TopologyError            not a replica set or sharded cluster
     |    +-- AccessError              a right is missing
     |    +-- ServerUnavailableError   no answer within the stated time
     |    +-- ForeignBridgeError       another app's bridge has this name
     +-- StreamError                   the change stream cannot continue
     |    +-- HistoryLostError         the oplog no longer reaches back
     |    +-- StreamRefusedError       the server refuses the pipeline or an option
     |    +-- UnreadableEventError     one event cannot be read
     +-- LeaseLostError                this process is no longer the listener
     +-- StaleFencingTokenError        a newer execution has taken over
     +-- OutdatedChangeError           another partition has written newer data
     +-- InvalidEnvelopeError          a message is forged, damaged or foreign
     +-- HandlerCrashedError           a change has killed its worker too often
     +-- RefusedChangeError            a change cannot be given to its handler
     +-- HandlerUsageError             a handler was used in a way it cannot serve
     +-- CommandRefusedError           an operator's command met another state
     +-- OutboxRefusedError            the outbox cannot take or deliver this
     +-- TransactionError              a transaction did not succeed
     |    +-- TransactionRequiredError  a lock was asked for outside a transaction
     |    +-- DocumentLockedError       another transaction holds the document
     |    +-- TransactionTimeoutError   it could not be finished in time
     |    +-- TransactionCanceledError  a two-phase transaction was rolled back
     |    +-- TransactionStateError     its state does not allow this step
     +-- EmbeddedServerError           a development server did not start

A class's docstring is its default message and contains the fix. Facts are keyword arguments and become attributes.
Every class survives pickling, which Celery's prefork pool needs.
"""

from __future__ import annotations

import inspect
from typing import Any


class MongoCeleryError(Exception):
    """The base of all errors of mongo_celery. The subclass names the failure and the fix."""

    retryable: bool = False
    """True if the same call may succeed later without any action."""

    def __init__(self, message: str | None = None, **facts: Any) -> None:
        super().__init__(message or " ".join(inspect.getdoc(type(self)).split()))  # type: ignore[union-attr]
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(cls: type[MongoCeleryError], args: tuple[Any, ...], facts: dict[str, Any]) -> MongoCeleryError:
    error = cls(*args)
    error.__dict__.update(facts)
    return error


class ConfigurationError(MongoCeleryError):
    """An option, a source or a handler is wrong. Correct it as the message says."""


class ForkedClientError(ConfigurationError):
    """
    A MongoClient was opened before the worker forked. Use `bridge.client`, or create the
    client inside the handler or in `worker_process_init`.
    """


class DeploymentError(MongoCeleryError):
    """MongoDB cannot serve a bridge as it is deployed. The message names the missing part."""


class TopologyError(DeploymentError):
    """
    Change streams need a replica set or a sharded cluster. Start mongod with `--replSet`
    and run `rs.initiate()`. A set of one member is enough.
    """


class AccessError(DeploymentError):
    """The MongoDB user lacks a right. Grant it, or choose the alternative that the message names."""


class ServerUnavailableError(DeploymentError):
    """MongoDB gave no answer within the stated time. Check the URL, the network and the servers."""

    retryable = True


class ForeignBridgeError(DeploymentError):
    """
    Another app or environment has a bridge of this name on the same MongoDB. Give one of them another name or state
    database. If the broker, the collection or the app's name has moved, run `celery -A APP listener --take-over`.
    """


class StreamError(MongoCeleryError):
    """The change stream cannot continue. The subclass says why."""


class HistoryLostError(StreamError):
    """
    The oplog no longer reaches the stored position, so changes between it and the oldest oplog entry are lost. For each
    handler that lost them, run `celery -A APP changes reset HANDLER --to oldest` (continue at that entry) or `--to
    now`. Or start the listener once with `--on-history-lost oldest` or `now` for all handlers. Then enlarge the oplog.
    """


class StreamRefusedError(StreamError):
    """The server refuses the change stream's pipeline or options. Correct them. Retrying cannot help."""


class UnreadableEventError(StreamError):
    """
    A change event cannot be read, even without its documents. The server says that it is larger than 16 MB, or that a
    required image is missing. If an image option is set (`full_document`, `full_document_before_change`), leave it out
    and start again. Otherwise move the handlers past it: `celery -A APP changes reset HANDLER --to now`.
    """


class LeaseLostError(MongoCeleryError):
    """Another listener now leads this bridge. Nothing needs to be done: this one becomes a standby."""

    retryable = True


class StaleFencingTokenError(MongoCeleryError):
    """
    A newer execution has already written to the target, so nothing was written. Do not catch this error: this execution
    ends without a failure, and the newer one continues.
    """


class OutdatedChangeError(MongoCeleryError):
    """
    Another partition has handled a later change of this document, because its partition key has changed. This write
    would replace newer data by older data, so nothing was written. Skip the change, or catch the error if only the
    latest state counts. To write the older data anyway, replay its dead letter with `--over-newer`.
    """


class InvalidEnvelopeError(MongoCeleryError):
    """
    A message is forged, damaged or from another installation. It was dropped and changed nothing.
    Find the other program that writes to the broker.
    """


class HandlerCrashedError(MongoCeleryError):
    """
    The worker process ended while handling this change more often than `max_crashes` allows.
    Look for a signal, the out-of-memory killer or a hard time limit in the worker's log.
    """


class RefusedChangeError(MongoCeleryError):
    """
    This change was refused before its handler was called. The message says why. Fix the cause and restart the listener,
    then run `celery -A APP changes retry HANDLER`. Or skip the change: `celery -A APP changes skip HANDLER`.
    """


class HandlerUsageError(MongoCeleryError):
    """A handler was used in a way that it cannot serve. The message names the way that works."""


class CommandRefusedError(MongoCeleryError):
    """The state has changed since the command read it, or does not allow this. Check it, then repeat the command."""


class OutboxRefusedError(MongoCeleryError):
    """
    The outbox refused this write. Nothing was written, unless the message says otherwise. Possible reasons: an entry
    that cannot be encoded, a task that needs an unknown `_id`, too many pending entries, a document above 16 MB, a
    delete of a document with pending entries, or the outbox's own field in the update.
    """


class TransactionError(MongoCeleryError):
    """A transaction did not succeed. The subclass or the message says why."""


class TransactionRequiredError(TransactionError):
    """
    A document can only be locked inside a transaction on a replica set or sharded cluster. Pass the
    session of a transaction in progress, such as the one that `transactional` hands to the function.
    """


class DocumentLockedError(TransactionError):
    """Another transaction holds the document. Try again later, or leave out nowait=."""

    retryable = True


class TransactionTimeoutError(TransactionError):
    """
    The transaction could not be finished in time. Pass session= to every operation of its body: a write without it
    waits for its own transaction. Otherwise look for contention, an election, or another transaction that holds a
    document. Then try again.
    """

    retryable = True


class TransactionCanceledError(TransactionError):
    """A two-phase transaction was rolled back. No participant keeps any of its changes. The message says why."""


class TransactionStateError(TransactionError):
    """
    The transaction's state does not allow this call: the transaction is unknown, foreign, or too advanced. To see it,
    run `celery -A APP transactions list ID`.
    """


class EmbeddedServerError(MongoCeleryError):
    """A development server did not start. The message names the missing part and how to get it."""
