"""What the pages of the shop show is kept up by a handler, and read by the API as it is."""

from mongo_celery import Change
from shop.celery import bridge


@bridge.on_change("shop.orders")
async def show(change: Change) -> None:
    """Keep one line beside each order. The worker runs it on the event loop of all async handlers."""
    key = {"_id": change.document_key["_id"]}
    lines = change.fenced(bridge.async_client.shop.order_lines)
    if change.full_document is None:  # deleted since
        await lines.delete_one(key)
    else:
        order = change.full_document
        await lines.replace_one(key, {"text": f"{order['customer']}: {order['status']}"}, upsert=True)
