"""Handlers with a delay, which record when each change has run by the server's clock."""

from __future__ import annotations

from mongo_celery import Change, Changes
from mongo_celery.mongo.steps import run_sync
from tests.rig.scripted.application import DATA, bridge
from tests.rig.scripted.handlers import Fact, _take_effect, add_handler

SECONDS = 4


def note_time(change: Change) -> None:
    """Keep the time of a change and that of its run."""
    key, document = change.document_key["_id"], change.full_document or {}
    times = {"handled": "$$NOW", "changed": {"$literal": change.cluster_time}}
    where = {"_id": f"{change.namespace}/{key}/{document.get('n')}"}
    bridge.client[DATA]["times"].update_one(where, [{"$set": times}], upsert=True)


def _effect(change: Change, fact: Fact) -> None:
    note_time(change)
    run_sync(_take_effect(change, fact))


add_handler("delayed", _effect, delay=SECONDS)


def _note_calls(changes: Changes) -> None:
    for change in changes:
        note_time(change)
        found = {"key": change.document_key["_id"], "n": (change.full_document or {})["n"]}
        bridge.client[DATA]["calls"].insert_one(found)


@bridge.on_changes(f"{DATA}.settled", delay=SECONDS, coalesce=True)
def settled(changes: Changes) -> None:
    """Note each change, again if it comes again."""
    _note_calls(changes)
