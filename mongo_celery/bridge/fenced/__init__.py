"""The fenced view of a PyMongo collection: writes that an older execution cannot undo (see `fence`)."""

from mongo_celery.bridge.fenced.asynchronous import AsyncFencedCollection
from mongo_celery.bridge.fenced.collection import FencedCollection
from mongo_celery.bridge.fenced.tombstones import SUFFIX as TOMBSTONES

__all__ = ["TOMBSTONES", "AsyncFencedCollection", "FencedCollection"]
