"""What the pages of the shop show is kept up by a handler, and read by the API as it is."""

from mongo_celery import Change
from shop.celery import bridge


@bridge.on_change("shop.orders")
def show(change: Change) -> None:
    """Keep one line beside each order. A handler is a plain function: it runs in a worker, which has no event loop."""
    key = {"_id": change.document_key["_id"]}
    lines = change.fenced("shop.order_lines")
    if change.full_document is None:  # deleted since
        lines.delete_one(key)
    else:
        order = change.full_document
        lines.replace_one(key, {"text": f"{order['customer']}: {order['status']}"}, upsert=True)
