"""`.ci/release` refuses what is no release, and leaves a checkout as it was where a check fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("checks", "slow", "browser", "brokers", "versions", "mutants", "chaos")
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- Something.\n"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def _commit(folder: Path) -> None:
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "all")
    green = "\n\n".join(f"{part}: status 0 after 1 minutes" for part in PARTS)
    _git(folder, "notes", "--ref=nightly", "add", "-m", green, _git(folder, "rev-parse", "HEAD^{tree}").strip())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
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


WITHOUT_CHAOS = """
tree=$(git rev-parse 'HEAD^{tree}')
red=$(git notes --ref=nightly show $tree | sed 's/chaos: status 0/chaos: status 1/')
git -c user.name=a -c user.email=a@b notes --ref=nightly add -f -m "$red" $tree
"""
WITHOUT_NEWS = "echo '## [Unreleased]' > CHANGELOG.md"


@pytest.mark.parametrize(
    ("prepare", "version", "reaches_checks"),
    [
        ("", "", False),
        ("", "v1.0.0", False),
        ("touch new.py", "0.2.0", False),
        ("touch new.py && git add . && git -c user.name=a -c user.email=a@b commit -qm later", "0.2.0", False),
        (WITHOUT_CHAOS, "0.2.0", False),
        (WITHOUT_NEWS, "0.2.0", False),
        ("", "0.2.0", True),
    ],
    ids=["no version", "a letter", "changes", "no nightly", "chaos was red", "no news", "a check fails"],
)
def test_what_is_no_release_is_refused(checkout: Path, prepare: str, version: str, *, reaches_checks: bool) -> None:
    """With a reason, without a tag, and with the checkout as it was."""
    subprocess.run(prepare, shell=True, cwd=checkout, check=True)
    if prepare == WITHOUT_NEWS:
        _commit(checkout)
    before = _git(checkout, "status", "--porcelain")
    done = subprocess.run([".ci/release", version], cwd=checkout, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr
    assert ("checks fail" in done.stdout) is reaches_checks
    assert _git(checkout, "status", "--porcelain") == before
    assert _git(checkout, "tag") == ""
