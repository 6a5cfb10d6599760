"""
The schema version of a bridge's state, and the steps that migrate an older state.

The lease stores the version as `schemaVersion`. A process that finds a newer version, or an older one without a step,
changes nothing. A listener runs the steps before it acquires the lease (`migrate`). Each step is one transaction that
holds the lease alone: while another listener leads, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pymongo
from pymongo.client_session import ClientSession
from pymongo.database import Database

from mongo_celery.errors import DeploymentError
from mongo_celery.mongo.opening import open_session

SCHEMA = 2
"""
Raise it with each stored field that gets another name, type or meaning. A test compares the names.

The lease of a beat in the collection `beat` has it as well, so a step must also raise it there.
"""

Step = Callable[[Database[dict[str, Any]], str, ClientSession], None]
"""Migrates the state of a bridge, by name, from one version to the next."""

STEPS: Mapping[int, Step] = {}
"""The step from each older version that can be read. Empty, because no release has an older state."""

_STEP_SECONDS = 60.0


def migrate(database: Database[dict[str, Any]], bridge: str, steps: Mapping[int, Step] = STEPS) -> None:
    """
    Migrate a bridge's state to this schema, step by step, while no listener leads.

    Args:
        steps: the step to the next version, by version.
    """
    leases = database["leases"]
    for version in range(min(steps, default=SCHEMA), SCHEMA):
        free = {"_id": bridge, "schemaVersion": version, "$expr": {"$lte": ["$expiresAt", "$$NOW"]}}

        def take(session: ClientSession, version: int = version, free: Mapping[str, Any] = free) -> None:
            if leases.update_one(free, {"$set": {"schemaVersion": version + 1}}, session=session).matched_count:
                steps[version](database, bridge, session)

        with pymongo.timeout(_STEP_SECONDS), open_session(database.client) as session:
            session.with_transaction(take)


def check_schema(lease: Mapping[str, Any], steps: Mapping[int, Step] = STEPS) -> None:
    """
    Refuse a bridge whose stored state has another schema.

    Raises:
        DeploymentError: the schema is newer or older than `SCHEMA`.
    """
    found, bridge = lease.get("schemaVersion"), lease["_id"]
    if found == SCHEMA:
        return
    if isinstance(found, int) and found > SCHEMA:
        raise DeploymentError(
            f"bridge {bridge}: a newer version of this package has stored the state, with schema {found}. This version "
            f"can only use schema {SCHEMA}, and has changed nothing. Deploy the newer version here, or use another "
            "state database: Bridge(..., database='...').",
        )
    if found in steps:
        raise DeploymentError(
            f"bridge {bridge}: an older version of this package has stored the state, with schema {found}. This "
            f"version needs schema {SCHEMA}. Stop the older listener, and start one of this version.",
        )
    raise DeploymentError(
        f"bridge {bridge}: a version before the first release has stored the state, so this version cannot read it, "
        "and has changed nothing. Drop the state database, or use another one: Bridge(..., database='...').",
    )
