"""
The language of pages, names and docstrings: plain English, with one word for one thing.

The bounds may only fall. If a change exceeds one, rewrite the sentence or rename the function. Spelling is checked by
codespell, which knows no patterns.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mongo_celery"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(each for each in sorted(ROOT.glob("docs/**/*.md")) if "decisions" not in each.parts),
    *sorted(ROOT.glob("examples/**/*.md")),
]

WORDS_MAX = 45_000
"""Words of all pages for users."""
PATTERNS_MAX = 0.15
"""Unidiomatic patterns in 100 words."""
PARAGRAPHS_MAX = 2.0
"""Percentage of paragraphs that have one."""
PARTICIPLES_MAX = 1.0
"""Percentage of functions that are named by a participle, such as `claimed`."""
PREPOSITIONS_MAX = 1.0
"""Percentage of functions whose name ends in a preposition."""
DOCSTRINGS_MAX = 3.7
"""Percentage of docstrings with an unidiomatic pattern."""
HOMES_MAX = 3
"""Private functions of one name in three modules or more."""

PATTERNS = [
    (
        r"(?<![\w'])(?:what|who|whoever|whatever|where)\s+(?:is|was|are|were|has|have|had|stands|stood|waits|came|comes|"
        r"nobody|others|it|they|a|an|the|one|somebody|writes|knows|gets|forgets|leads|needs|tells|can|may|must|makes|"
        r"handlers|this|else|users|people|each|listens|watches|runs|fails|goes|cannot|something)\b"
    ),
    r"\b(?:stand|stands|stood|standing)\b",
    r"\b(?:is|are|was|were) (?:told|said)\b|\btells?\b|\bsays? so\b",
    r"becom(?:e|es|ing) of|\bgo(?:es)? on\b|\bgone on\b|\b(?:is|are) asked(?: for)?\b|\bbegun\b",
    r"\b(?:nobody|somebody|everybody)\b",
    r", too\b",
    r"\bso (?:it )?(?:is|are|does|do|has|was)\b|\bnor (?:does|do|is|are|has)\b|\belse\b",
    r"\bof (?:its|their|his|one's) own\b|\bof (?:ours|yours)\b",
    r"\bwhere (?:a|an|the|one|it|that|they|nobody|somebody|this|there|MongoDB|what)\b",
    r"\bfor good\b|\bby itself\b|\bby themselves\b|\bat once\b",
]
RETIRED = re.compile(
    r"\b(?:set aside|whoever|cures?|charged|doomed|by hand|slip of the pen|relayout|go-on|outstanding)\b"
    r"|^(?:<{7}|>{7}) ",
    re.IGNORECASE | re.MULTILINE,
)
"""Words that pages no longer use, and the marks of a merge conflict."""

PARTICIPLE = re.compile(
    r"told|said|known|given|held|taken|kept|begun|left|met|written|made|shown|found|gone|seen|chosen|drawn|brought|"
    r"thrown|lost|stood|spent|done|owed|hidden|grown|caught|meant|understood|stopped|put|"
    r"(?!need$|feed$|seed$|speed$|embed$|exceed$|proceed$|succeed$)\w{2,}ed"
)
PREPOSITION = re.compile(
    r"of|in|by|to|from|on|at|for|with|within|behind|beside|below|around|about|after|before|than|as|like|between"
)
QUESTION = {"what", "who", "whose", "which", "whether", "where", "how", "when", "why"}


def paragraphs() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for block in re.split(r"\n\s*\n|\n(?=[|*-])", text):
            prose = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "X", block))
            if len(prose.split()) >= 7:
                yield page, prose


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def docstrings() -> Iterator[tuple[str, str]]:
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def functions() -> Iterator[tuple[str, list[str]]]:
    """Yield the words of each function's name and its place, without properties, overloads and special methods."""
    for path, module in modules().items():
        for node in ast.walk(module):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("__"):
                continue
            if any(re.search("property|overload", ast.unparse(each)) for each in node.decorator_list):
                continue
            words = [word for word in node.name.split("_") if word]
            if words:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}", words


def percentage(part: list[str], whole: int) -> float:
    return 100 * len(part) / whole


def test_pages_are_short_and_in_plain_english() -> None:
    total, blocks, hits, found, retired = 0, 0, 0, [], []
    for page, prose in paragraphs():
        total, blocks = total + (page.name != "CONTRIBUTING.md") * len(prose.split()), blocks + 1
        met = [each for pattern in PATTERNS for each in re.findall(pattern, prose, re.IGNORECASE)]
        hits += len(met)
        found += [f"{page.relative_to(ROOT)}: {met}: {prose[:80]}"] * bool(met)
        retired += [f"{page.relative_to(ROOT)}: {each}" for each in RETIRED.findall(prose)]
    assert retired == []
    assert total <= WORDS_MAX
    assert 100 * hits / total <= PATTERNS_MAX, "\n".join(found)
    assert percentage(found, blocks) <= PARAGRAPHS_MAX, "\n".join(found)


def test_names_are_verbs_with_objects() -> None:
    every = list(functions())
    participles = [place for place, words in every if PARTICIPLE.fullmatch(words[0])]
    prepositions = [place for place, words in every if len(words) > 1 and PREPOSITION.fullmatch(words[-1])]
    assert percentage(participles, len(every)) <= PARTICIPLES_MAX, participles
    assert percentage(prepositions, len(every)) <= PREPOSITIONS_MAX, prepositions


def test_docstrings_begin_with_a_verb_or_a_noun_and_are_plain() -> None:
    every = list(docstrings())
    questions = [place for place, text in every if (re.search(r"[A-Za-z']+", text) or [""])[0].lower() in QUESTION]
    assert questions == []
    assert [place for place, text in every if ";" in text.split("\n\n")[0]] == []
    pattern = re.compile("|".join(PATTERNS), re.IGNORECASE)
    found = [f"{place}: {met[0]}" for place, text in every if (met := pattern.search(re.sub(r"`[^`]*`", "X", text)))]
    assert percentage(found, len(every)) <= DOCSTRINGS_MAX, "\n".join(found)


def test_a_private_name_has_few_homes() -> None:
    homes: defaultdict[str, set[Path]] = defaultdict(set)
    for path, module in modules().items():
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("_"):
                homes[node.name].add(path)
    assert len({name for name, paths in homes.items() if len(paths) >= 3}) <= HOMES_MAX
