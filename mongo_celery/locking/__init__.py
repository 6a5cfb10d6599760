"""SELECT ... FOR UPDATE for MongoDB: lock documents inside transactions that are retried automatically."""

from mongo_celery.locking.call import LockOptions
from mongo_celery.locking.rows import select_for_update, select_many_for_update
from mongo_celery.mongo.transaction import after_commit, current, transactional

__all__ = [
    "LockOptions",
    "after_commit",
    "current",
    "select_for_update",
    "select_many_for_update",
    "transactional",
]
