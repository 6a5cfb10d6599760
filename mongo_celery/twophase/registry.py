"""Which coordinators belong to a Celery app, and the tasks and the beat entry that serve them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bson import json_util
from pymongo.errors import PyMongoError

from mongo_celery.errors import ConfigurationError, TransactionStateError
from mongo_celery.stream.reactions import is_transient
from mongo_celery.twophase.driver import BusyError, StuckError
from mongo_celery.twophase.participants import EXTENDED_JSON

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.twophase.coordinator import TwoPhaseCommit

STEP_TASK = "mongo_celery.transactions.step"
RECOVER_TASK = "mongo_celery.transactions.recover"
_ATTRIBUTE = "_mongo_celery_transactions"
_RETRIES_MAX = 20
_EXPIRES_SECONDS = 60.0
"""Messages must not pile up without workers; but busy workers must find one that still counts."""

_BACKOFF_SECONDS_MAX = 60


def add_coordinator(app: Celery, coordinator: TwoPhaseCommit, recover_every: float | None) -> None:
    """
    Note a coordinator of an app; the app's first brings the tasks.

    Raises:
        ConfigurationError: the app already has another of that name.
    """
    known = coordinators_of(app)
    if coordinator.name in known:
        raise ConfigurationError(
            f"the app already has a TwoPhaseCommit named {coordinator.name!r}; give this one name='...'."
        )
    if not known:
        _register_tasks(app)
    known[coordinator.name] = coordinator
    if recover_every is not None:
        app.add_periodic_task(
            recover_every,
            app.signature(RECOVER_TASK, args=(coordinator.name,)),
            name=f"{RECOVER_TASK} {coordinator.name}",
            expires=max(recover_every, _EXPIRES_SECONDS),
        )


def coordinators_of(app: Celery) -> dict[str, TwoPhaseCommit]:
    """All coordinators of an app by their names."""
    found: dict[str, TwoPhaseCommit] = app.__dict__.setdefault(_ATTRIBUTE, {})
    return found


def publish_step(app: Celery, name: str, transaction_id: Any, version: int | None) -> Any:
    """Ask for the next step of a transaction; the message carries its id and the driver's version."""
    text = json_util.dumps(transaction_id, json_options=EXTENDED_JSON)
    task: Any = app.tasks[STEP_TASK]
    return task.apply_async((name, text, version), serializer="json")


def _register_tasks(app: Celery) -> None:
    def step(task: Any, name: str, transaction_id: str, version: int | None) -> str | None:
        """Do one step of a transaction, and ask for the next."""
        identity = json_util.loads(transaction_id, json_options=EXTENDED_JSON)
        coordinator = coordinators_of(app).get(name)
        if coordinator is None:
            raise ConfigurationError(f"this worker's app has no TwoPhaseCommit named {name!r}.")
        try:
            after = coordinator.step(identity, version)
        except StuckError as error:
            raise TransactionStateError(f"transaction {identity!r} stays canceling: {error}.") from error
        except (PyMongoError, BusyError) as error:
            if isinstance(error, PyMongoError) and not is_transient(error):
                raise
            pause = min(2**task.request.retries, _BACKOFF_SECONDS_MAX)
            raise task.retry(exc=error, countdown=pause, max_retries=_RETRIES_MAX) from error
        if after is None:
            return None
        if not after.state.is_final:
            publish_step(app, name, identity, after.version)
        return str(after.state)

    def recover(name: str) -> dict[str, int]:
        """Finish what was left unfinished; counts by what became of it."""
        counts: dict[str, int] = {}
        for each in coordinators_of(app)[name].recover():
            became = "failed" if each.error else each.after
            counts[became] = counts.get(became, 0) + 1
        return counts

    register: Any = app.task
    options: dict[str, Any] = {"shared": False, "ignore_result": True}
    register(name=STEP_TASK, bind=True, acks_late=True, **options)(step)
    register(name=RECOVER_TASK, **options)(recover)
