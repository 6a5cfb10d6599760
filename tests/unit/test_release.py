"""`.ci/release` refuses what is no release, and leaves a checkout as it was where a check fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- Something.\n"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def _commit(folder: Path) -> None:
    """Commit everything, and note a green nightly for it."""
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "all")
    _git(folder, "notes", "--ref=nightly", "add", "-m", "green", _git(folder, "rev-parse", "HEAD^{tree}").strip())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Give a small project with the script, whose checks fail."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "release", tmp_path / ".ci" / "release")
    (tmp_path / ".ci" / "run").write_text("#!/bin/sh\necho checks fail\nexit 3\n", encoding="utf-8")
    (tmp_path / ".ci" / "run").chmod(0o755)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n', encoding="utf-8")
    _git(tmp_path, "init", "-q")
    _commit(tmp_path)
    return tmp_path


def _without_news(folder: Path) -> None:
    (folder / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-01-01\n", encoding="utf-8"
    )
    _commit(folder)


def _other_tree(folder: Path) -> None:
    (folder / "new.py").touch()
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "later than the nightly")


@pytest.mark.parametrize(
    ("prepare", "version", "reason"),
    [
        (lambda _folder: None, "", "Name the version"),
        (lambda _folder: None, "v1.0.0", "Name the version"),
        (lambda folder: (folder / "new.py").touch(), "0.2.0", "not committed"),
        (_other_tree, "0.2.0", "No green nightly"),
        (_without_news, "0.2.0", "nothing under [Unreleased]"),
        (lambda _folder: None, "0.2.0", "Nothing was released"),
    ],
    ids=["no version", "a letter", "changes", "no nightly", "no news", "a check fails"],
)
def test_what_is_no_release_is_refused(
    checkout: Path, prepare: Callable[[Path], None], version: str, reason: str
) -> None:
    """With a reason, without a tag, and with the checkout as it was."""
    prepare(checkout)
    before = _git(checkout, "status", "--porcelain")
    done = subprocess.run([".ci/release", version], cwd=checkout, check=False, capture_output=True, text=True)

    assert done.returncode != 0
    assert reason in done.stderr
    assert _git(checkout, "status", "--porcelain") == before
    assert _git(checkout, "tag") == ""


def test_an_interrupted_release_leaves_the_checkout_as_it_was(checkout: Path) -> None:
    """Checks take many minutes, and somebody loses patience."""
    (checkout / ".ci" / "run").write_text("#!/bin/sh\necho checking\nexec sleep 60\n", encoding="utf-8")
    _commit(checkout)
    release = subprocess.Popen(
        ["env", "--default-signal=INT", ".ci/release", "0.2.0"],  # what is started in the background ignores it
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert release.stdout is not None
    assert release.stdout.readline() == "checking\n"
    assert _git(checkout, "status", "--porcelain") != ""
    os.killpg(release.pid, signal.SIGINT)  # as the terminal does, to all of them
    _, said = release.communicate(timeout=60)

    assert release.returncode
    assert "Nothing was released" in said
    assert _git(checkout, "status", "--porcelain") == ""
