"""Reaching MongoDB for one command: an answer within a few seconds, or one sentence why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pymongo import MongoClient
from pymongo.errors import ConnectionFailure, PyMongoError

from mongo_celery.bridge.state.concern import state_concern
from mongo_celery.errors import ConfigurationError, ServerUnavailableError
from mongo_celery.mongo.opening import ANSWER_SECONDS, ping
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import Concern, explained

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring


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
        ping(client)
    except PyMongoError as error:
        raise in_words(error, state_concern(wiring.options)) from error
    return client


def _client(wiring: Wiring) -> MongoClient[dict[str, Any]]:
    try:
        return wiring.client
    except ValueError as error:  # what the driver raises for a port that is none
        message = f"the MongoDB URL of bridge {wiring.name} is not valid: {short(error)}"
        raise ConfigurationError(message) from error


def in_words(error: PyMongoError, concern: Concern) -> Exception:
    """An error of ours for what a command cannot go on after; the error itself where there is no better word."""
    if isinstance(error, ConnectionFailure) or error.timeout:
        return ServerUnavailableError(
            f"MongoDB gave no answer within {ANSWER_SECONDS:.0f} s; check its URL, the network and the servers. "
            f"Last error: {short(error)}",
        )
    return explained(error, concern) or error
