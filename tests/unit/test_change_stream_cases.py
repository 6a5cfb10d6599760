"""The list of the drivers' change stream cases: all of them, each with its test or the reason why it has none."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/change-streams.md"
CASES = {
    "change-streams": 24,
    "clusterTime": 1,
    "disambiguatedPaths": 3,
    "errors": 4,
    "nsType": 2,
    "pre_and_post_images": 10,
    "resume-allowlist": 18,
    "resume-errorLabels": 18,
    "showExpandedEvents": 9,
}
"""How many cases each file of the specification has."""


def _rows() -> list[tuple[str, int, str]]:
    rows = re.findall(r"^\| ([\w-]+) (\d+) \| [^|]+ \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    return [(file, int(place), proof) for file, place, proof in rows]


def test_the_list_has_every_case_once() -> None:
    """Eighty-nine, by their places in the files."""
    assert Counter(file for file, _, _ in _rows()) == CASES
    for file, count in CASES.items():
        assert [place for each, place, _ in _rows() if each == file] == list(range(1, count + 1))


def test_every_case_has_a_test_or_a_reason() -> None:
    """That the tests exist, `test_readme` sees to."""
    for file, place, proof in _rows():
        assert "`tests/" in proof or proof.startswith("not applicable: "), f"{file} {place}"
