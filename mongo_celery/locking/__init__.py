"""SELECT ... FOR UPDATE for MongoDB: transactions that repeat themselves, and documents locked inside them."""

from mongo_celery.locking.call import LockOptions, SkippingOptions
from mongo_celery.locking.freeing import set_automatic_freeing
from mongo_celery.locking.rows import select_for_update, select_for_update_of, select_many_for_update
from mongo_celery.mongo.transaction import after_commit, current, transactional

__all__ = [
    "LockOptions",
    "SkippingOptions",
    "after_commit",
    "current",
    "select_for_update",
    "select_for_update_of",
    "select_many_for_update",
    "set_automatic_freeing",
    "transactional",
]
