"""The project that Django runs: what its settings say of us, and its Celery app with all that belongs to it."""

from __future__ import annotations

import os
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from mongo_celery.arguments import check_known
from mongo_celery.errors import ConfigurationError, MongoCeleryError

if TYPE_CHECKING:
    from celery import Celery

SETTING = "MONGO_CELERY"
_KEYS = ("APP",)
_NOT_THE_PROJECTS = frozenset({"mongo_celery", "celery", "kombu", "django", "importlib", "pymongo", "__main__", ""})
_LIBRARIES = ("<frozen ", *(f"{sysconfig.get_path(each)}{os.sep}" for each in ("stdlib", "purelib", "platlib")))
_loading = threading.RLock()
_loaded: WeakSet[Any] = WeakSet()
"""Apps whose modules are imported: to look for them costs milliseconds for each Django application."""


@dataclass(frozen=True, slots=True)
class ProjectSettings:
    """
    The setting `MONGO_CELERY`, a dict that may be missing; docs/django.md says what each key means.

    Bridges have no options here: they are arguments of `Bridge(...)`, or Celery's settings, which Django's
    `CELERY_MONGO_CELERY_<OPTION>` are.

    Attributes:
        app: where the Celery app is, as `celery -A` takes it: `"shop"` or `"shop.celery:app"`. It may be missing where
            it is in the package of the settings module.
    """

    app: str


def project_settings() -> ProjectSettings:
    """
    What Django's settings say now; a test may override them.

    Raises:
        ConfigurationError: it is no dict, a key is unknown, or nothing says where the Celery app is.
    """
    given = getattr(settings, SETTING, {})
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"the setting {SETTING} must be a dict, such as {{'APP': 'shop.celery:app'}}.")
    check_known([str(key) for key in given], _KEYS, f"key of the setting {SETTING},")
    app = given.get("APP") or str(getattr(settings, "SETTINGS_MODULE", None) or "").partition(".")[0]
    if not isinstance(app, str) or not app:
        raise ConfigurationError(
            f"nothing says where the Celery app is: set {SETTING} = {{'APP': 'shop.celery:app'}}, as celery -A takes "
            "it."
        )
    return ProjectSettings(app)


def celery_app() -> Celery:
    """
    The project's Celery app, with its task modules, and the modules named `changes`, imported.

    What belongs to it is in `BRIDGES`, `OUTBOXES` and `TWO_PHASE_COMMITS`. Nothing connects.

    Raises:
        ConfigurationError: there is no app where the settings say, or a module of it cannot be imported; `__cause__`
            is what the import has raised.
    """
    where = project_settings().app
    with _loading:
        app = _found(where)
        if app not in _loaded:
            with _django_left_as_it_is(app):
                _import_modules(app, where)
            _loaded.add(app)
    return app


def place_of(error: BaseException) -> str | None:
    """
    File and line of the project's own code that an import ended in; None where none was reached.

    A sentence on an option does not say which of a hundred handlers has it. A project that is itself installed where
    libraries are is told of the last line of either.
    """
    found = own = None
    for frame, line in traceback.walk_tb((error.__cause__ or error).__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _NOT_THE_PROJECTS:
            found = f"{frame.f_code.co_filename}, line {line}"
            own = own if frame.f_code.co_filename.startswith(_LIBRARIES) else found
    return own or found


def _found(where: str) -> Celery:
    from celery import Celery
    from celery.app.utils import find_app

    try:
        found = find_app(where)
    except MongoCeleryError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"no Celery app can be had from {where!r} ({_brief(error)}): set {SETTING} = {{'APP': ...}} to where it "
            "is, as celery -A takes it."
        ) from error
    if not isinstance(found, Celery):
        raise ConfigurationError(
            f"{where!r} is {type(found).__name__}, and no Celery app: set {SETTING} = {{'APP': ...}} to where it is, "
            "as celery -A takes it."
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
            f"a task module of the Celery app {where!r} cannot be imported: {_brief(error)}."
        ) from error


@contextmanager
def _django_left_as_it_is(app: Celery) -> Iterator[None]:
    """
    Keep Celery from setting Django up once more: that would reset the logging and, in a request, its script prefix.

    Before imports Celery's fixup sets Django up and runs all checks, of which ours are that ask for the app.
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
