"""Modules named `changes` are found beside what the app includes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from celery import Celery

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
