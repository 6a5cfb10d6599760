"""What follows a change. Handlers do not know the app, and run inside the context of the one that has them."""

from flask import current_app, render_template

from mongo_celery import Change
from shop.extensions import bridge
from shop.models import Order


@bridge.on_change(Order)
def show(change: Change) -> None:
    """Keep the page of each order rendered, by the app's own templates."""
    pages, key = change.fenced("pages"), {"_id": change.document_key["_id"]}
    if change.full_document is None:  # deleted since
        pages.delete_one(key)
    else:
        pages.replace_one(key, {"text": render_template("order.txt", order=change.full_document)}, upsert=True)


@bridge.on_change("stock", fields={"left"})
def refill(change: Change) -> None:
    """Ask for more of what is scarce: `mongo.db.stock`, by its name in the database of `MONGO_URI`."""
    article = change.full_document
    if article is not None and article["left"] < current_app.config["LEAST_STOCK"]:
        key = {"_id": change.document_key["_id"]}
        change.fenced("refills").replace_one(key, {"left": article["left"]}, upsert=True)
