"""
The version of everything that is stored of a bridge, and the steps that bring an older state up to date.

The lease keeps it as `schemaVersion`. Whoever finds a newer one, or an older one to which no step belongs, changes
nothing. A listener takes the steps before it acquires the lease (`migrate`), one transaction each, which has the lease
for itself: while another listener leads, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pymongo
from pymongo.client_session import ClientSession
from pymongo.database import Database

from mongo_celery.errors import DeploymentError
from mongo_celery.mongo.opening import open_session

SCHEMA = 1

Step = Callable[[Database[dict[str, Any]], str, ClientSession], None]
"""Brings the state of a bridge, by its name, from one version to the next."""

STEPS: Mapping[int, Step] = {}
"""The step from each older version that can be read. There is none yet: 1 is the first version."""

_STEP_SECONDS = 60.0


def migrate(database: Database[dict[str, Any]], bridge: str, steps: Mapping[int, Step] = STEPS) -> None:
    """
    Bring the state of a bridge to this version's schema, step by step, while no listener leads.

    Args:
        steps: by the version from which each leads to the next one.
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
            f"bridge {bridge}: a newer version of this package has stored its state, with schema {found}. This version "
            f"reads schema {SCHEMA}, so it changes nothing. Deploy the newer version here, or give this process a "
            "state database of its own: Bridge(..., database='...').",
        )
    if found in steps:
        raise DeploymentError(
            f"bridge {bridge}: an older version of this package has stored its state, with schema {found}. This one "
            f"reads schema {SCHEMA}. Stop the older listener and start one of this version: it brings the state up to "
            "date.",
        )
    raise DeploymentError(
        f"bridge {bridge}: its state was stored before the first release, without schema {SCHEMA}, and cannot be read. "
        "Nothing is changed. Drop the state database, or use another one: Bridge(..., database='...').",
    )
