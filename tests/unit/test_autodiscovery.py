"""Modules named `changes` are found beside what the app includes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, signals

from mongo_celery import Bridge


def test_a_module_named_changes_is_found_beside_the_included_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that nobody imports is a subscription that silently does not exist."""
    package = tmp_path / "discovered_shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tasks.py").touch()
    (package / "changes.py").write_text("FOUND = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    app = Celery("discovered", include=["discovered_shop.tasks"], set_as_current=False)
    Bridge(app, "mongodb://localhost:1")

    app.loader.import_default_modules()

    assert sys.modules["discovered_shop.changes"].FOUND is True


def test_packages_that_celery_is_told_of_are_searched_for_tasks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is told the name: nobody but Celery knows what was given to `autodiscover_tasks`."""
    package = tmp_path / "told_shop"
    package.mkdir()
    for name in ("__init__", "tasks", "changes"):
        (package / f"{name}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    app = Celery("told", set_as_current=False)
    Bridge(app, "mongodb://localhost:1")
    found, options = list[bool](), list[dict[str, Any]]([{}, {"related_name": "changes"}])
    for names in options:
        app.autodiscover_tasks(["told_shop"], **names)
        app.loader.import_default_modules()
        found.append("told_shop.changes" in sys.modules)
    assert found == [False, True]


def test_an_app_may_do_without_discovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's module of that name stays alone."""
    package = tmp_path / "undiscovered_shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tasks.py").touch()
    (package / "changes.py").write_text("raise RuntimeError('not for the bridge')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    app = Celery("undiscovered", include=["undiscovered_shop.tasks"], set_as_current=False)
    Bridge(app, "mongodb://localhost:1", autodiscover=False)

    app.loader.import_default_modules()

    assert "undiscovered_shop.changes" not in sys.modules


def test_modules_are_looked_for_after_celerys_fixup_has_set_django_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order app and bridge were imported; before it no module with a model can be imported."""
    package = tmp_path / "django_shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "changes.py").write_text(
        "from tests.unit.test_autodiscovery import DjangoFixup\nassert DjangoFixup.is_set_up\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    app = Celery("django", fixups=[f"{__name__}:DjangoFixup"], set_as_current=False)
    Bridge(app, "mongodb://localhost:1")

    app.loader.import_default_modules()

    assert "django_shop.changes" in sys.modules


class DjangoFixup:
    """What is used of Celery's."""

    is_set_up = False

    def __init__(self, app: Celery) -> None:
        signals.import_modules.connect(self.on_import_modules, sender=app)

    def on_import_modules(self, **_: Any) -> None:
        """Set Django up."""
        type(self).is_set_up = True

    def autodiscover_tasks(self) -> list[str]:
        """Django's applications, once it has some."""
        assert self.is_set_up
        return ["django_shop"]
