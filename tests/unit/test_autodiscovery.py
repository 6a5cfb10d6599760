"""Modules named `changes` are found beside what the app includes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, signals

from mongo_celery import Bridge


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def write(name: str, changes: str) -> None:
        (tmp_path / name).mkdir()
        for module, text in (("__init__", ""), ("tasks", ""), ("changes", changes)):
            (tmp_path / name / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    return write


def test_a_module_named_changes_is_found_beside_the_included_modules(package: Callable[[str, str], None]) -> None:
    """Celery alone knows what `autodiscover_tasks` was given, so such a package is found by the given name only."""
    package("discovered_shop", "")
    package("undiscovered_shop", "raise RuntimeError('not for the bridge')\n")
    package("told_shop", "")
    app = Celery("discovered", include=["discovered_shop.tasks"], set_as_current=False)
    Bridge(app, "mongodb://localhost:1")
    options: list[dict[str, Any]] = [{}, {"related_name": "changes"}]
    found = []
    for names in options:
        app.autodiscover_tasks(["told_shop"], **names)
        app.loader.import_default_modules()
        found.append([name in sys.modules for name in ("discovered_shop.changes", "told_shop.changes")])
    assert found == [[True, False], [True, True]]
    without = Celery("undiscovered", include=["undiscovered_shop.tasks"], set_as_current=False)
    Bridge(without, "mongodb://localhost:1", autodiscover=False)
    without.loader.import_default_modules()


def test_modules_are_looked_for_after_celerys_fixup_has_set_django_up(package: Callable[[str, str], None]) -> None:
    """In whatever order app and bridge were imported; before it no module with a model can be imported."""
    package("django_shop", "from tests.unit.test_autodiscovery import DjangoFixup\nassert DjangoFixup.is_set_up\n")
    app = Celery("django", fixups=[f"{__name__}:DjangoFixup"], set_as_current=False)
    Bridge(app, "mongodb://localhost:1")
    app.loader.import_default_modules()
    assert "django_shop.changes" in sys.modules


class DjangoFixup:
    is_set_up = False

    def __init__(self, app: Celery) -> None:
        signals.import_modules.connect(self.on_import_modules, sender=app)

    def on_import_modules(self, **_: Any) -> None:
        type(self).is_set_up = True

    def autodiscover_tasks(self) -> list[str]:
        assert self.is_set_up
        return ["django_shop"]
