"""Whom an error of the state database concerns, for the sentences about it."""

from __future__ import annotations

from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.mongo.verdicts import Concern


def state_concern(options: BridgeOptions) -> Concern:
    """The state database of a bridge, and what it needs there."""
    return Concern(
        f"the state database {options.database} of bridge {options.name}",
        "find, insert, update, remove and createIndex there (readWrite)",
    )
