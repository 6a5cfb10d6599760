"""Users' code: every error by its name, and what each can be asked. It is checked, and never run."""

from __future__ import annotations

from typing import assert_type

import mongo_celery
from mongo_celery.errors import (
    AccessError,
    CommandRefusedError,
    ConfigurationError,
    DeploymentError,
    DocumentLockedError,
    EmbeddedServerError,
    ForeignBridgeError,
    ForkedClientError,
    HandlerCrashedError,
    HandlerUsageError,
    HistoryLostError,
    InvalidEnvelopeError,
    LeaseLostError,
    MongoCeleryError,
    OutboxRefusedError,
    OutdatedChangeError,
    RefusedChangeError,
    ServerUnavailableError,
    StaleFencingTokenError,
    StreamError,
    StreamRefusedError,
    TopologyError,
    TransactionCanceledError,
    TransactionError,
    TransactionRequiredError,
    TransactionStateError,
    TransactionTimeoutError,
    UnreadableEventError,
)

SET_UP_WRONGLY: tuple[type[MongoCeleryError], ...] = (
    AccessError,
    ConfigurationError,
    DeploymentError,
    EmbeddedServerError,
    ForeignBridgeError,
    ForkedClientError,
    HandlerUsageError,
    StreamRefusedError,
    TopologyError,
)
OF_A_RUN: tuple[type[MongoCeleryError], ...] = (
    CommandRefusedError,
    HandlerCrashedError,
    HistoryLostError,
    InvalidEnvelopeError,
    LeaseLostError,
    OutboxRefusedError,
    OutdatedChangeError,
    RefusedChangeError,
    ServerUnavailableError,
    StaleFencingTokenError,
    StreamError,
    UnreadableEventError,
)
OF_A_TRANSACTION: tuple[type[MongoCeleryError], ...] = (
    DocumentLockedError,
    TransactionCanceledError,
    TransactionError,
    TransactionRequiredError,
    TransactionStateError,
    TransactionTimeoutError,
)


def is_worth_another_attempt(error: Exception) -> bool:
    """What a caller decides by."""
    if isinstance(error, DocumentLockedError | TransactionTimeoutError):
        return True
    if isinstance(error, MongoCeleryError):
        assert_type(error.retryable, bool)
        return error.retryable
    assert_type(mongo_celery.__version__, str)
    return False
