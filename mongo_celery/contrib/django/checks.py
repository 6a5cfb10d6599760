"""
The messages of `manage.py check`, each with an id, cause and fix. docs/django.md lists them.

Each check reads only settings and code, and opens no connection. `check --deploy` also queries the servers, like
`changes check` and `outbox status --check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from django.core.checks import CheckMessage, Error, Warning, register  # noqa: A004 - Django's name
from django.db import connections, router

from mongo_celery.command_line import CommandLine
from mongo_celery.contrib.django.project import app_address, celery_app
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.redaction import short, without_credentials
from mongo_celery.visible import visible

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.findings import Finding

TAG = "mongo_celery"
"""Tag of these checks: `manage.py check --tag mongo_celery` runs only them."""

_LABEL = "mongo_celery"
_PREFIX = "CELERY_MONGO_CELERY_"
_PORT = "27017"


def register_checks() -> None:
    """Register the checks after Django has loaded its applications."""
    register(check_project, TAG)
    register(check_servers, TAG, deploy=True)


def check_project(app_configs: Sequence[Any] | None, **_: Any) -> list[CheckMessage]:
    """Check settings and code."""
    if not _is_selected(app_configs):
        return []
    try:
        where = app_address()
    except ConfigurationError as error:
        return [Error(str(error), id="mongo_celery.E001")]
    try:
        app = celery_app()
    except Exception as error:  # noqa: BLE001 - a module may raise any error, and `check` shows the rest
        text = str(error) if isinstance(error, ConfigurationError) else short(error)
        return [
            Error(
                without_credentials(text),
                hint=f"Run `celery -A {where} report`. It imports the same modules and shows the whole error.",
                id="mongo_celery.E002",
            )
        ]
    parts = (_check_app, _check_beat, _check_bridges)
    return [message for part in parts for message in part(app)]


def check_servers(app_configs: Sequence[Any] | None, **options: Any) -> list[CheckMessage]:
    """Query MongoDB, broker and workers, each within some seconds. If the project has errors, query none."""
    own = check_project(app_configs, **options)
    if not _is_selected(app_configs) or any(isinstance(each, Error) for each in own):
        return []
    app = celery_app()
    return [*_ask_bridges(app), *_ask_outboxes(app)]


def _is_selected(app_configs: Sequence[Any] | None) -> bool:
    """Return False if `check` was given only the labels of other applications."""
    return app_configs is None or any(each.label == _LABEL for each in app_configs)


# -- the app ---------------------------------------------------------------------------------------


def _check_app(app: Celery) -> Iterator[CheckMessage]:
    from mongo_celery.bridge.wiring import BRIDGES
    from mongo_celery.outbox.registry import OUTBOXES
    from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS

    if not any(hasattr(each, "autodiscover_tasks") for each in getattr(app, "_fixups", ())):
        yield Error(
            "The Celery app was made without Django's settings. Celery finds no modules named changes or tasks, "
            "and handlers leave database connections open.",
            hint="Set DJANGO_SETTINGS_MODULE in the environment before Celery(...) is called. Celery's page on "
            "Django shows how.",
            id="mongo_celery.E003",
        )
    if not (BRIDGES.of(app) or OUTBOXES.of(app) or TWO_PHASE_COMMITS.of(app)):
        yield Warning(
            "The Celery app has no bridge, outbox or TwoPhaseCommit.",
            hint="Make one in the module of the app, or in a module that it imports. If you need none, remove "
            "mongo_celery.contrib.django from INSTALLED_APPS.",
            id="mongo_celery.W004",
        )
    if app.conf.task_always_eager:
        yield Warning(
            "task_always_eager is set. Changes are not committed, and outboxes run tasks in the process that "
            "delivers them.",
            hint="Unset it for listeners and workers. For tests use mongo_celery.testing.",
            id="mongo_celery.W005",
        )


def _check_beat(app: Celery) -> Iterator[CheckMessage]:
    from mongo_celery.bridge.wiring import BRIDGES
    from mongo_celery.outbox.health import is_scheduled
    from mongo_celery.outbox.registry import OUTBOXES
    from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS

    line = CommandLine.of(app)
    beat, recover = line.celery("beat"), line.celery("transactions", "recover")
    if OUTBOXES.of(app) and not is_scheduled(app):
        names = ", ".join(_show_name(each) for each in OUTBOXES.of(app))
        yield Warning(
            f"Nothing starts sweeps of the app's outboxes ({names}). After a crash or an outage, entries stay unsent.",
            hint=f"Make an outbox with sweep_every=..., and run `{beat}` or the listener of a bridge. Or call sweep() "
            "regularly.",
            id="mongo_celery.W009",
        )
    idle = [each.name for each in TWO_PHASE_COMMITS.of(app) if each.recover_every is None]
    if idle and not BRIDGES.of(app):
        yield Warning(
            f"Beat does not recover the transactions of {', '.join(idle)}. If a process dies, its transactions "
            "stay incomplete.",
            hint=f"Give them recover_every=..., and run `{beat}`. Or run `{recover}` regularly.",
            id="mongo_celery.W010",
        )


def _show_name(outbox: Any) -> str:
    """Return the outbox's name without opening its collection, which would create a client here."""
    return str(outbox.runtime.known_name or "one without a name")


# -- bridges ---------------------------------------------------------------------------------------


def _check_bridges(app: Celery) -> Iterator[CheckMessage]:
    from mongo_celery.bridge.wiring import BRIDGES

    for wiring in BRIDGES.of(app):
        yield from _check_bridge(wiring)


def _check_bridge(wiring: Wiring) -> Iterator[CheckMessage]:
    name = f"bridge {wiring.name}"
    wrong = _find_refusal(lambda: wiring.options)
    if wrong is not None:
        yield Error(
            wrong,
            hint=f"Correct the argument of Bridge(...), or the setting {_PREFIX}<OPTION>.",
            obj=name,
            id="mongo_celery.E012",
        )
    nowhere = _find_refusal(lambda: wiring.default_database)
    if nowhere is not None:
        yield Error(nowhere, hint=f"Set {_PREFIX}DATABASE_URL.", obj=name, id="mongo_celery.E013")
    if not wiring.handlers:
        yield Warning(
            "It has no handlers, so it dispatches no changes.",
            hint="Put handlers into modules named changes in your Django applications, or import their modules in "
            "the module of the app.",
            obj=name,
            id="mongo_celery.W014",
        )
    if nowhere is None:
        for handler in wiring.handlers:
            yield from _check_handler(wiring, handler)


def _check_handler(wiring: Wiring, handler: Handler) -> Iterator[CheckMessage]:
    name = f"handler {handler.name} of bridge {wiring.name}"
    wrong = _find_refusal(lambda: handler.selector(wiring.default_database))
    if wrong is not None:
        yield Error(wrong, obj=name, id="mongo_celery.E015")
        return
    for target in handler.targets:
        if isinstance(target, type) and hasattr(getattr(target, "_meta", None), "concrete_model"):
            alias = router.db_for_write(target)
            if _have_no_host_in_common(wiring.url, connections[alias].settings_dict):
                yield Warning(
                    f"{target.__name__} is stored in Django's database {alias!r}, but the bridge's URL has none "
                    "of its hosts. If they are different clusters, the handler gets no changes.",
                    hint=f"Give {_PREFIX}DATABASE_URL and DATABASES[{alias!r}] the same hosts.",
                    obj=name,
                    id="mongo_celery.W016",
                )


def _find_refusal(look: Callable[[], object]) -> str | None:
    """Return the sentence of a refusal, or None."""
    try:
        look()
    except ConfigurationError as error:
        return without_credentials(str(error))
    return None


def _have_no_host_in_common(url: str, database: Any) -> bool:
    """Return True if the text of a bridge's URL shares no host with one of Django's databases."""
    host, port = str(database.get("HOST") or "localhost"), str(database.get("PORT") or _PORT)
    return not _hosts(host, port) & _hosts(url)


def _hosts(given: str, port: str = _PORT) -> set[str]:
    """Return the hosts of a URL or a list, as text. An `SRV` name is not resolved."""
    rest = given.partition("://")[2] or given
    hosts = rest.partition("/")[0].partition("?")[0].rpartition("@")[2].lower().replace("127.0.0.1", "localhost")
    srv = given.startswith("mongodb+srv")
    return {each if ":" in each or srv else f"{each}:{port}" for each in hosts.split(",")}


# -- servers ---------------------------------------------------------------------------------------


def _ask_bridges(app: Celery) -> Iterator[CheckMessage]:
    from mongo_celery.bridge.operations.preflight import check
    from mongo_celery.bridge.wiring import BRIDGES

    bridges = BRIDGES.of(app)
    for wiring in bridges:
        line = CommandLine(app_address(), wiring.name if len(bridges) > 1 else None)
        yield from _to_messages(check(wiring, line), f"bridge {wiring.name}", "E101", "W102")


def _ask_outboxes(app: Celery) -> Iterator[CheckMessage]:
    from mongo_celery.outbox.health import read_health
    from mongo_celery.outbox.registry import OUTBOXES

    for health in read_health(app, OUTBOXES.of(app), thorough=True) if OUTBOXES.of(app) else ():
        yield from _to_messages(health.findings, f"outbox {health.name}", "E103", "W104")


def _to_messages(findings: Iterable[Finding], obj: str, failing: str, surprising: str) -> Iterator[CheckMessage]:
    for each in findings:
        if each.severity != "ok":
            kind, number = (Error, failing) if each.severity == "failing" else (Warning, surprising)
            hint = visible("  ".join(each.commands)) or None
            yield kind(visible(f"{each.code}: {each.sentence}"), hint=hint, obj=obj, id=f"{TAG}.{number}")
