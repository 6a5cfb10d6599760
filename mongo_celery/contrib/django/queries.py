"""Django queries in a transaction that repeats when MongoDB requests it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from mongo_celery.errors import ConfigurationError
from mongo_celery.locking.django import django_client, joined
from mongo_celery.mongo.transaction.transactional import check_function
from mongo_celery.mongo.transaction.transactional import transactional as with_session
from mongo_celery.outbox.django import mongodb_alias

P = ParamSpec("P")
Result = TypeVar("Result")


def transactional(using: str | None = None, **options: Any) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """
    Run a function in a transaction that includes Django's queries. It repeats when MongoDB requests it.

    ::

        @transactional(outbox=outbox)
        def sell(seat, customer):
            [found] = select_for_update(Seat.objects.filter(pk=seat, customer=None))
            found.customer = customer
            found.save()
            send_ticket.delay(seat)        # stored by the transaction, sent after its commit

    It combines `mongo_celery.transactional` and `mongo_celery.locking.django.joined`. After a write conflict Django's
    `atomic` ends with an error, but this runs the body again. An `atomic` inside is part of it. Inside another such
    function, it joins the outer transaction.

    Not promised: queries of other databases. A relational database's queries are not part of the transaction, and
    repeat with the body. Open that database's `atomic` around the call, or use a task that `outbox` sends.

    Args:
        using: alias of the database. By default Django's default or, if that is relational, the MongoDB database.
        options: the options of `mongo_celery.transactional`, such as `timeout` and `outbox`.

    Raises:
        ConfigurationError: an option cannot work, or it decorates something that it cannot run, such as a Celery task,
            a generator or a coroutine. From the call: the database does not exist.
    """
    if callable(using):
        return transactional()(using)  # type: ignore[unreachable] # for who forgets the brackets, as Django's atomic
    run = with_session(lambda: django_client(mongodb_alias(using)), **options).run

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        check_function(function)
        if inspect.iscoroutinefunction(function):
            raise ConfigurationError("Django's transactions do not work in coroutines. Decorate a plain function.")

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            def body(session: Any) -> Result:
                with joined(session, mongodb_alias(using)):
                    return function(*args, **kwargs)

            return run(body)

        return call

    return decorate
