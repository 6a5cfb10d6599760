"""What happens when an order changes."""

from typing import Any

from mongo_celery import Change
from shop.celery import bridge


# Retries are for the services that a handler calls: while MongoDB is away, a change waits, and nothing is counted.
@bridge.on_change("shop.orders", autoretry_for=(ConnectionError,), retry_backoff=True, max_retries=8)
def summarise(change: Change) -> None:
    """Keep one summary beside each order."""
    key = {"_id": change.document_key["_id"]}
    summaries = change.fenced("shop.order_summaries")
    if change.full_document is None:  # deleted since
        summaries.delete_one(key)
    else:
        summaries.replace_one(key, summary_of(change.full_document), upsert=True)


def summary_of(order: dict[str, Any]) -> dict[str, Any]:
    """What the order list shows of an order."""
    total = sum(line["price"] * line["quantity"] for line in order["lines"])
    return {"customer": order["customer"], "lines": len(order["lines"]), "total": total, "status": order["status"]}
