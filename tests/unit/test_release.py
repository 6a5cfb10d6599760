"""`.ci/release` refuses what is no release, and leaves a checkout as it was where a check fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- Something.\n"


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
    _git(tmp_path, "add", ".")
    _git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "all")
    return tmp_path


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def _release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([".ci/release", *arguments], cwd=folder, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [[], ["next"], ["v1.0.0"], ["1.0"]], ids=["none", "word", "letter", "short"])
def test_what_is_no_version_is_refused(checkout: Path, arguments: list[str]) -> None:
    done = _release(checkout, *arguments)

    assert (done.returncode, done.stderr) == (1, "Name the version, as in .ci/release 0.2.0.\n")


def test_a_checkout_with_changes_is_refused(checkout: Path) -> None:
    (checkout / "new.py").touch()
    done = _release(checkout, "0.2.0")

    assert done.returncode == 1
    assert "not committed" in done.stderr


def test_a_changelog_without_news_is_refused(checkout: Path) -> None:
    text = CHANGELOG.replace("### Added\n\n- Something.\n", "## [0.1.0] - 2026-01-01\n")
    (checkout / "CHANGELOG.md").write_text(text, encoding="utf-8")
    _git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-am", "no news")
    done = _release(checkout, "0.2.0")

    assert done.returncode == 1
    assert "nothing under [Unreleased]" in done.stderr


def test_a_changelog_of_a_first_release_without_news_is_refused(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n", encoding="utf-8")
    _git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-am", "no news")
    done = _release(checkout, "0.2.0")

    assert "nothing under [Unreleased]" in done.stderr


def test_an_interrupted_release_leaves_the_checkout_as_it_was(checkout: Path) -> None:
    """Checks take many minutes, and somebody loses patience."""
    (checkout / ".ci" / "run").write_text("#!/bin/sh\necho checking\nexec sleep 60\n", encoding="utf-8")
    _git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-am", "slow checks")
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


def test_where_a_check_fails_nothing_is_released(checkout: Path) -> None:
    done = _release(checkout, "0.2.0")

    assert done.returncode != 0
    assert "Nothing was released" in done.stderr
    assert _git(checkout, "status", "--porcelain") == ""
    assert _git(checkout, "tag") == ""
