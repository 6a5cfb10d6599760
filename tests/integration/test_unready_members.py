"""A member of a set that is neither primary nor secondary, as one is for a moment behind a start or an election."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import ConfigurationError

from mongo_celery.bridge.worker.attribution import conflict_cause, infrastructure_cause
from mongo_celery.embedded.mongodb import MongoServer
from mongo_celery.mongo.verdicts import is_transient


def test_a_session_that_such_a_member_does_not_take_is_an_outage() -> None:
    """PyMongo calls it a mistake of the configuration, and says so of every transaction; nobody is charged with it."""
    with (
        MongoServer(replica_set="never-initiated") as server,
        MongoClient[dict[str, Any]](server.url) as client,
        client.start_session() as session,
        pytest.raises(ConfigurationError) as caught,
    ):
        client.admin.command("ping", session=session)

    assert infrastructure_cause(caught.value)
    assert not conflict_cause(caught.value)
    assert is_transient(caught.value)


def test_other_mistakes_of_a_configuration_are_the_callers_own() -> None:
    """They do not pass."""
    with pytest.raises(ConfigurationError) as caught:
        MongoClient("mongodb://127.0.0.1:1/?compressors=zlib&retryWrites=true&authMechanism=MONGODB-OIDC")

    assert not infrastructure_cause(caught.value)
    assert not is_transient(caught.value)
