"""
Transactions that repeat themselves: the drivers' callback API with a stated limit, for threads and for asyncio.

| module | what is in it |
|---|---|
| `transactional` | the decorator and context manager |
| `frames` | which transaction a thread or an asyncio task is in, and what is known of it |
| `ending` | what an error means: once more, or the end |
| `blocking`, `asynchronous` | the loop that repeats a body, over either of PyMongo's clients |
| `blocks` | what a `with` has begun, found again where it is left |
"""

from mongo_celery.mongo.transaction.frames import after_commit, current
from mongo_celery.mongo.transaction.transactional import Collects, hide_session, transactional

__all__ = ["Collects", "after_commit", "current", "hide_session", "transactional"]
