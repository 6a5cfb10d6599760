"""The Celery app of the running Django project, with its modules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from mongo_celery.errors import ConfigurationError, MongoCeleryError

if TYPE_CHECKING:
    from celery import Celery

SETTING = "MONGO_CELERY_APP"
_loading = threading.RLock()
_loaded: WeakSet[Any] = WeakSet()
"""Apps with imported modules. A new import would cost milliseconds for each Django application."""


def app_address() -> str:
    """
    Return the address of the Celery app for `celery -A`: `"shop"` or `"shop.celery:app"`.

    It is Django's setting `MONGO_CELERY_APP`, or the package of the settings module.

    Raises:
        ConfigurationError: neither is set.
    """
    found = getattr(settings, SETTING, None)
    found = found or str(getattr(settings, "SETTINGS_MODULE", None) or "").partition(".")[0]
    if not isinstance(found, str) or not found:
        raise ConfigurationError(
            f"The Celery app of the project is unknown. Set {SETTING}, for example {SETTING} = 'shop.celery:app'."
        )
    return found


def celery_app() -> Celery:
    """
    Return the project's Celery app, after importing its task modules and the modules named `changes`.

    Its bridges, outboxes and transactions are in `BRIDGES`, `OUTBOXES` and `TWO_PHASE_COMMITS`. Nothing connects.

    Raises:
        ConfigurationError: the app of the settings does not exist, or one of its modules cannot be imported.
    """
    where = app_address()
    with _loading:
        app = _find_app(where)
        if app not in _loaded:
            with _django_left_as_it_is(app):
                _import_modules(app, where)
            _loaded.add(app)
    return app


def _find_app(where: str) -> Celery:
    from celery import Celery
    from celery.app.utils import find_app

    try:
        found = find_app(where)
    except MongoCeleryError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"No Celery app can be loaded from {where!r} ({_brief(error)}). Set {SETTING} to the value that you "
            "give to celery -A, such as 'shop.celery:app'."
        ) from error
    if not isinstance(found, Celery):
        raise ConfigurationError(
            f"{where!r} is {type(found).__name__}, not a Celery app. Set {SETTING} to the value that you give to "
            "celery -A, such as 'shop.celery:app'."
        )
    return found


def _import_modules(app: Celery, where: str) -> None:
    try:
        app.loader.import_default_modules()
        app.finalize()
    except (MongoCeleryError, ImproperlyConfigured):
        raise
    except Exception as error:
        raise ConfigurationError(
            f"A task module of the Celery app {where!r} cannot be imported: {_brief(error)}."
        ) from error


@contextmanager
def _django_left_as_it_is(app: Celery) -> Iterator[None]:
    """
    Keep Celery from setting up Django again, which would reset logging and, in a request, the script prefix.

    Before imports, Celery's fixup sets up Django and runs all checks. Ours request the app.
    """
    from celery.signals import import_modules

    with ExitStack() as stack:
        for fixup in getattr(app, "_fixups", ()) if apps.ready else ():
            receiver = getattr(fixup, "on_import_modules", None)
            if receiver is not None:
                import_modules.disconnect(receiver, sender=app)
                stack.callback(import_modules.connect, receiver, sender=app)
        yield


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
