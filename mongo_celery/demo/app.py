"""
The demo's Celery app: `celery -A mongo_celery.demo.app listener` and `... worker`.

Three handlers:

- `name_from_customer` and `name_into_order` keep the customer's name in each order: the join that races when
  it is done at write time. They belong to two subscriptions, so no fencing token orders them against each
  other; the guard is the customer's own version: an order is written only where its copy is older. Together
  they cover both orders of arrival. If the order comes first, the customer's handler finds it; if the
  customer comes first, the order's handler finds the customer; in between, both do, and the older one loses.
- `summarise` keeps one summary for each order, by a fenced replace.

`name_into_order` and `name_from_customer` write to orders, which are watched. They do not feed themselves:
one asks for inserts only, and `summarise` only for updates that touch `n`.

All handlers also write a journal, which only the verdict reads.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from celery import Celery
from pymongo import WriteConcern
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError, PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery import Bridge, Change
from mongo_celery.demo.setting import NAME_FROM_CUSTOMER, NAME_INTO_ORDER, SUMMARISE, from_environment
from mongo_celery.errors import StaleFencingTokenError

setting = from_environment()
app = Celery(
    "mongo_celery.demo",
    broker=setting.redis_url,
    broker_transport_options={"global_keyprefix": setting.key_prefix},
    broker_connection_retry_on_startup=True,
)
bridge = Bridge(app, setting.mongo_url, **setting.bridge_options)

ORDERS = setting.collection("orders")
CUSTOMERS = setting.collection("customers")
SUMMARIES = setting.collection("summaries")
RETRY: dict[str, Any] = {"autoretry_for": (PyMongoError,), "retry_backoff": True, "max_retries": 8}


@bridge.on_change(CUSTOMERS, name=NAME_FROM_CUSTOMER, **RETRY)
def name_from_customer(change: Change) -> None:
    """A customer was written: its name goes into its orders."""
    note_start(change, NAME_FROM_CUSTOMER, number(change, "version"))
    if change.full_document is not None:
        copy_name(change.full_document)


@bridge.on_change(ORDERS, name=NAME_INTO_ORDER, operations={"insert"}, **RETRY)
def name_into_order(change: Change) -> None:
    """An order was inserted: it gets its customer's name, if there is a customer yet."""
    note_start(change, NAME_INTO_ORDER, number(change, "n"))
    order = change.full_document
    customer = order and collection("customers").find_one({"_id": order["customer"]})
    if order and customer:
        copy_name(customer, order["_id"])


@bridge.on_change(ORDERS, name=SUMMARISE, operations={"insert", "update"}, fields={"n"}, **RETRY)
def summarise(change: Change) -> None:
    """An order was inserted or updated: its summary follows, fenced."""
    n, key = number(change, "n"), change.document_key["_id"]
    note_start(change, SUMMARISE, n)
    freeze_once(change, f"{key}:{n}")
    try:
        change.fenced(SUMMARIES).replace_one({"_id": key}, {"n": n, "total": 10 * n}, upsert=True)
    except StaleFencingTokenError:
        collection("refusals").insert_one({"order": key, "n": n, "fence": change.fencing_token})
        raise  # the newer execution decides


def copy_name(customer: dict[str, Any], order: str | None = None) -> None:
    """Write a customer's name into its orders, or into one of them, where the copy there is older or missing."""
    which = {"customer": customer["_id"]} if order is None else {"_id": order}
    version = customer["version"]
    collection("orders").update_many(
        {**which, "customer_version": {"$not": {"$gte": version}}},
        {"$set": {"customer_name": customer["name"], "customer_version": version}},
    )


def collection(name: str) -> Collection[dict[str, Any]]:
    """One of the run's collections. An effect that a fail-over can roll back would be lost: hence majority."""
    found = bridge.collection(setting.collection(name))
    return found.with_options(write_concern=WriteConcern("majority"), read_concern=ReadConcern("majority"))


def number(change: Change, field: str) -> int:
    """A number as the change itself wrote it; the looked-up document may be newer."""
    if change.update_description is not None:
        return int(change.update_description["updatedFields"][field])
    assert change.full_document is not None, "an insert carries its document"
    return int(change.full_document[field])


def note_start(change: Change, handler: str, n: int) -> None:
    """Write the journal's entry for the start of a handler."""
    collection("journal").insert_one(
        {
            "handler": handler,
            "key": change.document_key["_id"],
            "number": n,
            "fence": change.fencing_token,
            "pid": os.getpid(),
        },
    )


def freeze_once(change: Change, place: str) -> None:
    """The demo's meanest fault: this process stops, as a paused virtual machine does, just before it writes."""
    if place != setting.freeze:
        return
    try:
        collection("frozen").insert_one({"_id": place, "pid": os.getpid(), "fence": change.fencing_token})
    except DuplicateKeyError:
        return  # the execution that took over
    # To this very thread: it cannot run on while another thread takes the signal.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
