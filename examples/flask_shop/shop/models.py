"""The orders, as MongoEngine knows them."""

import mongoengine

from mongo_celery.contrib.mongoengine import OutboxMixin


class Order(OutboxMixin, mongoengine.Document):  # type: ignore[misc]
    """An order, with the outbox's field while something is pending."""

    customer = mongoengine.StringField(required=True)
    status = mongoengine.StringField(default="new")
    meta = {"collection": "orders"}  # noqa: RUF012 - as MongoEngine wants it
