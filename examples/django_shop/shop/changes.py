"""What happens when an order changes, whoever has changed it."""

from mongo_celery import Change
from mongo_celery.contrib.django import instance
from shop.celery import bridge
from shop.models import Order


# Retries are for the services that a handler calls: while MongoDB is away, a change waits, and nothing is counted.
@bridge.on_change(Order, autoretry_for=(ConnectionError,), retry_backoff=True, max_retries=8)
def show(change: Change) -> None:
    """Keep the order's card."""
    key = {"_id": change.document_key["_id"]}
    cards = change.fenced("shop.shop_ordercard")
    order = instance(change, Order)
    if order is None:  # deleted since
        cards.delete_one(key)
    else:
        card = {"customer": order.customer, "article": order.article.name, "confirmed": order.confirmed}
        cards.replace_one(key, card, upsert=True)
