"""Handlers that copy what changes, each document to one of its own."""

from __future__ import annotations

from mongo_celery import Change
from tests.rig.scripted.acts import WantedError
from tests.rig.scripted.application import DATA, bridge
from tests.rig.scripted.handlers import Fact, add_handler


def _copy(change: Change, fact: Fact) -> None:
    key, copied = {"_id": f"{fact['handler']}/{fact['key']}"}, {"$set": {"n": fact["n"]}}
    if change.session is not None:
        counted = copied | {"$inc": {"times": 1}}
        bridge.client[DATA]["copies"].update_one(key, counted, upsert=True, session=change.session)
    else:
        change.fenced(f"{DATA}.copies").update_one(key, copied, upsert=True)


add_handler("copied", _copy, failure_policy="dead_letter", autoretry_for=(ConnectionError,), max_retries=0)
add_handler(
    "retried", _copy, failure_policy="dead_letter", autoretry_for=(WantedError,), retry_kwargs={"countdown": 0.1}
)
add_handler("copied_once", _copy, failure_policy="dead_letter", transactional=True)
