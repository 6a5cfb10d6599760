"""`.ci/release` refuses what is no release, and leaves a checkout as it was where a check fails."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("checks", "slow", "browser", "brokers", "versions", "mutants", "chaos")
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- Something.\n"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def _commit(folder: Path) -> None:
    """Commit everything, and note a green nightly for it."""
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "all")
    green = "\n\n".join(f"{part}: status 0 after 1 minutes" for part in PARTS)
    _git(folder, "notes", "--ref=nightly", "add", "-m", green, _git(folder, "rev-parse", "HEAD^{tree}").strip())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Give a small project with the script, whose checks fail."""
    (tmp_path / ".ci").mkdir()
    for script in ("release", "nightly"):
        shutil.copy(ROOT / ".ci" / script, tmp_path / ".ci" / script)
    (tmp_path / ".ci" / "run").write_text("#!/bin/sh\necho checks fail\nexit 3\n", encoding="utf-8")
    (tmp_path / ".ci" / "run").chmod(0o755)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n', encoding="utf-8")
    _git(tmp_path, "init", "-q")
    _commit(tmp_path)
    return tmp_path


def _later_than_the_nightly(folder: Path) -> None:
    (folder / "new.py").touch()
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "later than the nightly")


def _without_chaos(folder: Path) -> None:
    tree = _git(folder, "rev-parse", "HEAD^{tree}").strip()
    note = _git(folder, "notes", "--ref=nightly", "show", tree).replace("chaos: status 0", "chaos: status 1")
    _git(folder, "notes", "--ref=nightly", "add", "-f", "-m", note, tree)


def _without_news(folder: Path) -> None:
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n## [0.1.0]\n", encoding="utf-8")
    _commit(folder)


def _nothing(_folder: Path) -> None:
    """Leave it as it is."""


@pytest.mark.parametrize(
    ("prepare", "version"),
    [
        (_nothing, ""),
        (_nothing, "v1.0.0"),
        (lambda folder: (folder / "new.py").touch(), "0.2.0"),
        (_later_than_the_nightly, "0.2.0"),
        (_without_chaos, "0.2.0"),
        (_without_news, "0.2.0"),
        (_nothing, "0.2.0"),
    ],
    ids=["no version", "a letter", "changes", "no nightly", "chaos was red", "no news", "a check fails"],
)
def test_what_is_no_release_is_refused(checkout: Path, prepare: Callable[[Path], None], version: str) -> None:
    """With a reason, without a tag, and with the checkout as it was."""
    prepare(checkout)
    before = _git(checkout, "status", "--porcelain")
    done = subprocess.run([".ci/release", version], cwd=checkout, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr
    assert ("checks fail" in done.stdout) is (prepare is _nothing and version == "0.2.0")
    assert _git(checkout, "status", "--porcelain") == before
    assert _git(checkout, "tag") == ""
