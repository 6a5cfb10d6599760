"""The Celery tasks that serve a `TwoPhaseCommit`: one step of a transaction, and recovery."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kombu.exceptions import OperationalError
from pymongo.errors import PyMongoError

from mongo_celery.app import add_task
from mongo_celery.errors import TransactionTimeoutError
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.transaction.scopes import outside_transactions
from mongo_celery.mongo.verdicts import is_transient
from mongo_celery.twophase.coordinator import BusyError
from mongo_celery.twophase.recoveries import Recovery
from mongo_celery.twophase.states import Transaction
from mongo_celery.twophase.values import from_text, to_text

if TYPE_CHECKING:
    from celery import Celery

STEP_TASK = "mongo_celery.transactions.step"
RECOVER_TASK = "mongo_celery.transactions.recover"
_RETRIES_MAX = 20
_PAUSES = Pauses(first=1.0, longest=60.0)


def publish_step(app: Celery, name: str, transaction_id: Any, task_id: str) -> Any:
    """Ask for the first step of a transaction; the message carries its id, in BSON's own types."""
    task: Any = app.tasks[STEP_TASK]
    with outside_transactions():  # it is noted as queued already, whatever happens to a transaction around
        return task.apply_async((name, to_text(transaction_id), None), task_id=task_id, serializer="json")


def _publish_next(task: Any, arguments: tuple[str, str, int | None]) -> None:
    try:
        task.apply_async(arguments, serializer="json")
    except OperationalError as error:
        # The step is done: what is tried again is the next one. If the broker does not take that either, recovery
        # finds the transaction.
        raise task.retry(args=arguments, exc=error, **_retry_options(task)) from error


def _retry_options(task: Any) -> dict[str, float]:
    return {"countdown": _PAUSES.nth(task.request.retries), "max_retries": _RETRIES_MAX}


def register_tasks(
    app: Celery,
    step_of: Callable[[str, Any, int | None], Transaction | None],
    recover_of: Callable[[str], Sequence[Recovery]],
) -> None:
    """
    Register the tasks of an app, once for all its `TwoPhaseCommit`s.

    Args:
        app: the Celery app.
        step_of: has the `TwoPhaseCommit` of that name do one step of a transaction.
        recover_of: has the `TwoPhaseCommit` of that name finish what was left.
    """

    def step(task: Any, name: str, transaction_id: str, version: int | None) -> str | None:
        """Do one step of a transaction, and ask for the next."""
        try:
            after = step_of(name, from_text(transaction_id), version)
        except (PyMongoError, BusyError, TransactionTimeoutError) as error:
            if isinstance(error, PyMongoError) and not is_transient(error):
                raise
            raise task.retry(exc=error, **_retry_options(task)) from error
        if after is None:
            return None
        if not after.state.is_final:
            _publish_next(task, (name, transaction_id, after.version))
        return str(after.state)

    def recover(name: str) -> dict[str, int]:
        """Finish what was left unfinished; counts by what became of it."""
        counts: dict[str, int] = {}
        for each in recover_of(name):
            became = "failed" if each.error else each.after
            counts[became] = counts.get(became, 0) + 1
        return counts

    add_task(app, STEP_TASK, step, bind=True, acks_late=True)
    add_task(app, RECOVER_TASK, recover)
