"""Reaching MongoDB for one command: an answer within a few seconds, or one sentence why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pymongo
from pymongo import MongoClient
from pymongo.errors import ConnectionFailure, OperationFailure, PyMongoError

from mongo_celery.errors import AccessError, ConfigurationError, ServerUnavailableError
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import needs_deployment

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

ANSWER_SECONDS = 4.0
"""How long a command waits for the first answer of a server."""

_AUTHENTICATION_FAILED = 18


def reach(wiring: Wiring) -> MongoClient[dict[str, Any]]:
    """
    The bridge's client, after the primary has answered once.

    Raises:
        ServerUnavailableError: no primary answered within `ANSWER_SECONDS`.
        AccessError: the login was refused.
        ConfigurationError: the URL is not valid.
    """
    client = _client(wiring)
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            client.admin.command("ping")
    except PyMongoError as error:
        raise explained(error) from error
    return client


def _client(wiring: Wiring) -> MongoClient[dict[str, Any]]:
    try:
        return wiring.client
    except ValueError as error:  # what the driver raises for a port that is none
        message = f"the MongoDB URL of bridge {wiring.name} is not valid: {short(error)}"
        raise ConfigurationError(message) from error


def explained(error: PyMongoError) -> Exception:
    """An error of ours for what a command cannot go on after; the error itself where there is no better word."""
    if isinstance(error, ConnectionFailure) or error.timeout:
        return ServerUnavailableError(
            f"MongoDB gave no answer within {ANSWER_SECONDS:.0f} s; check its URL, the network and the servers. "
            f"Last error: {short(error)}",
        )
    if isinstance(error, OperationFailure) and error.code == _AUTHENTICATION_FAILED:
        return AccessError(
            f"MongoDB refused the login; check user, password and authSource in the URL. It said: {short(error)}",
        )
    return needs_deployment(error) or error
