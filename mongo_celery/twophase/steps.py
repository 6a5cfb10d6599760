"""Which coordinators belong to a Celery app, and the tasks and the beat entry that serve them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kombu.exceptions import OperationalError
from pymongo.errors import PyMongoError

from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import is_transient
from mongo_celery.twophase.completion import stuck
from mongo_celery.twophase.coordinator import BusyError, StuckError
from mongo_celery.twophase.values import from_text, to_text

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.twophase.twophase import TwoPhaseCommit

STEP_TASK = "mongo_celery.transactions.step"
RECOVER_TASK = "mongo_celery.transactions.recover"
_ATTRIBUTE = "_mongo_celery_transactions"
_RETRIES_MAX = 20
_EXPIRES_SECONDS = 60.0
"""Messages must not pile up without workers; but busy workers must find one that still counts."""

_PAUSES = Pauses(first=1.0, longest=60.0)


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
    """Ask for the next step of a transaction; the message carries its id, in BSON's own types, and the version."""
    task: Any = app.tasks[STEP_TASK]
    return task.apply_async((name, to_text(transaction_id), version), serializer="json")


def _publish_next(task: Any, arguments: tuple[str, str, int | None]) -> None:
    try:
        task.apply_async(arguments, serializer="json")
    except OperationalError as error:
        # The step is done: what is tried again is the next one. If the broker does not take that either, recovery
        # finds the transaction.
        raise task.retry(args=arguments, exc=error, **_patience(task)) from error


def _patience(task: Any) -> dict[str, float]:
    return {"countdown": _PAUSES.nth(task.request.retries), "max_retries": _RETRIES_MAX}


def _register_tasks(app: Celery) -> None:
    def step(task: Any, name: str, transaction_id: str, version: int | None) -> str | None:
        """Do one step of a transaction, and ask for the next."""
        identity = from_text(transaction_id)
        coordinator = coordinators_of(app).get(name)
        if coordinator is None:
            raise ConfigurationError(f"this worker's app has no TwoPhaseCommit named {name!r}.")
        try:
            after = coordinator.step(identity, version)
        except StuckError as error:
            raise stuck(coordinator.log.get(identity), error) from error
        except (PyMongoError, BusyError) as error:
            if isinstance(error, PyMongoError) and not is_transient(error):
                raise
            raise task.retry(exc=error, **_patience(task)) from error
        if after is None:
            return None
        if not after.state.is_final:
            _publish_next(task, (name, transaction_id, after.version))
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
