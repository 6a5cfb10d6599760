"""The Celery tasks of a `TwoPhaseCommit`: one runs a transaction, the other recovery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.app import add_task
from mongo_celery.errors import TransactionCanceledError, TransactionTimeoutError
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.transaction.scopes import outside_transactions
from mongo_celery.mongo.verdicts import is_transient
from mongo_celery.twophase.recoveries import Recovery
from mongo_celery.twophase.values import from_text, to_text

if TYPE_CHECKING:
    from celery import Celery

RUN_TASK = "mongo_celery.transactions.run"
RECOVER_TASK = "mongo_celery.transactions.recover"
_RETRIES_MAX = 20
_PAUSES = Pauses(first=1.0, longest=60.0)


def publish_run(app: Celery, name: str, transaction_id: Any, task_id: str) -> Any:
    """Send the task that runs a transaction. The message contains its id, in BSON's types."""
    task: Any = app.tasks[RUN_TASK]
    with outside_transactions():  # it is already noted as queued, whatever happens to a surrounding transaction
        return task.apply_async((name, to_text(transaction_id)), task_id=task_id, serializer="json")


def register_tasks(
    app: Celery, run: Callable[[str, Any], object], recover: Callable[[str], Sequence[Recovery]]
) -> None:
    """
    Register the tasks of an app, once for all its `TwoPhaseCommit`s.

    Args:
        app: the Celery app.
        run: runs a transaction of a `TwoPhaseCommit`, by name.
        recover: runs the recovery of a `TwoPhaseCommit`, by name.
    """

    def run_transaction(task: Any, name: str, transaction_id: str) -> str:
        """Run a transaction to its end, and return its final state."""
        try:
            run(name, from_text(transaction_id))
        except TransactionCanceledError:
            return "canceled"
        except (PyMongoError, TransactionTimeoutError) as error:
            if isinstance(error, PyMongoError) and not is_transient(error):
                raise
            pause = _PAUSES.nth(task.request.retries)
            raise task.retry(exc=error, countdown=pause, max_retries=_RETRIES_MAX) from error
        return "done"

    def recover_transactions(name: str) -> dict[str, int]:
        """Finish abandoned transactions, and return their counts by final state."""
        return Counter("failed" if each.error else each.after for each in recover(name))

    add_task(app, RUN_TASK, run_transaction, bind=True, acks_late=True)
    add_task(app, RECOVER_TASK, recover_transactions)
