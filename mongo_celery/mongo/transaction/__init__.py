"""
Transactions that are retried automatically: the drivers' callback API with a defined limit, for threads and for
asyncio.

| module | content |
|---|---|
| `transactional` | the decorator and context manager |
| `scopes` | the current transaction of a thread or an asyncio task, and its state |
| `ending` | the verdict on an error: another attempt, or the end |
| `attempts` | one attempt, over either of PyMongo's clients |
"""

from mongo_celery.mongo.transaction.scopes import after_commit, current
from mongo_celery.mongo.transaction.transactional import Collects, hide_session, transactional

__all__ = ["Collects", "after_commit", "current", "hide_session", "transactional"]
