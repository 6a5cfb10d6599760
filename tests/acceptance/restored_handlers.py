"""A handler whose target is outside of the cluster of its changes, beside the facts."""

from __future__ import annotations

from mongo_celery import Change
from tests.rig.scripted.handlers import Fact, add_handler
from tests.rig.scripted.recording import facts


def _register(change: Change, fact: Fact) -> None:
    registers = change.fenced(facts()["registers"])
    registers.update_one({"_id": fact["key"]}, {"$push": {"log": fact["n"]}}, upsert=True)


add_handler("registered", _register, failure_policy="dead_letter")
