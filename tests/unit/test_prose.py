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
    each
    for each in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    )
    if "decisions" not in each.parts
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
QUESTIONS_MAX = 0.0
"""Percentage of docstrings that begin with a question word."""
SEMICOLONS_MAX = 0.0
"""Semicolons in 100 first paragraphs of docstrings."""
HOMES_MAX = 3
"""Private functions of one name in three modules or more."""

PATTERNS = {
    "a clause in place of a noun": r"(?<![\w'])(?:what|who|whoever|whatever|where)\s+(?:is|was|are|were|has|have|had|"
    r"stands|stood|waits|came|comes|nobody|others|it|they|a|an|the|one|somebody|writes|knows|gets|forgets|leads|needs|"
    r"tells|can|may|must|makes|handlers|this|else|users|people|each|listens|watches|runs|fails|goes|cannot|something)\b",
    "stands": r"\b(?:stand|stands|stood|standing)\b",
    "is told": r"\b(?:is|are|was|were) (?:told|said)\b|\btells?\b|\bsays? so\b",
    "goes on": r"becom(?:e|es|ing) of|\bgo(?:es)? on\b|\bgone on\b|\b(?:is|are) asked(?: for)?\b|\bbegun\b",
    "nobody": r"\b(?:nobody|somebody|everybody)\b",
    ", too": r", too\b",
    "so does": r"\bso (?:it )?(?:is|are|does|do|has|was)\b|\bnor (?:does|do|is|are|has)\b|\belse\b",
    "of its own": r"\bof (?:its|their|his|one's) own\b|\bof (?:ours|yours)\b",
    "where for if": r"\bwhere (?:a|an|the|one|it|that|they|nobody|somebody|this|there|MongoDB|what)\b",
    "for good": r"\bfor good\b|\bby itself\b|\bby themselves\b|\bat once\b",
}
RETIRED = {
    "set aside": "move to the dead letters",
    "whoever": "the process that, the person who",
    "cure": "fix",
    "cures": "fixes",
    "charged": "counted",
    "doomed": "rollback-only",
    "by hand": "manually",
    "slip of the pen": "typo",
    "relayout": "repartition",
    "go-on": "reset",
    "outstanding": "in flight",
}
"""Words that pages no longer use, and the words instead."""

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
    """Yield paragraphs, list items and rows of tables, without code and without addresses of links."""
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
    """Yield each docstring and its place."""
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


def test_pages_are_short_and_free_of_unidiomatic_patterns() -> None:
    total, blocks, hits, named = 0, 0, 0, []
    for page, prose in paragraphs():
        total, blocks = total + (page.name != "CONTRIBUTING.md") * len(prose.split()), blocks + 1
        found = [name for name, pattern in PATTERNS.items() if re.search(pattern, prose, re.IGNORECASE)]
        hits += sum(len(re.findall(pattern, prose, re.IGNORECASE)) for pattern in PATTERNS.values())
        if found:
            named.append(f"{page.relative_to(ROOT)}: {found}: {prose[:80]}")
    assert total <= WORDS_MAX
    assert 100 * hits / total <= PATTERNS_MAX, "\n".join(named)
    assert percentage(named, blocks) <= PARAGRAPHS_MAX, "\n".join(named)


def test_pages_use_no_retired_word() -> None:
    pattern = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
    found = [
        f"{page.relative_to(ROOT)}: {word}, instead: {RETIRED[word.lower()]}"
        for page, prose in paragraphs()
        for word in pattern.findall(prose)
    ]
    assert found == []


def test_names_are_verbs_with_objects() -> None:
    every = list(functions())
    participles = [place for place, words in every if PARTICIPLE.fullmatch(words[0])]
    prepositions = [place for place, words in every if len(words) > 1 and PREPOSITION.fullmatch(words[-1])]
    assert percentage(participles, len(every)) <= PARTICIPLES_MAX, participles
    assert percentage(prepositions, len(every)) <= PREPOSITIONS_MAX, prepositions


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    every = list(docstrings())
    firsts = [(place, re.search(r"[A-Za-z']+", text)) for place, text in every]
    questions = [place for place, first in firsts if first and first[0].lower() in QUESTION]
    semicolons = sum(text.split("\n\n")[0].count(";") for _, text in every)
    assert percentage(questions, len(every)) <= QUESTIONS_MAX, questions
    assert 100 * semicolons / len(every) <= SEMICOLONS_MAX


def test_docstrings_have_few_unidiomatic_patterns() -> None:
    every = [(place, re.sub(r"`[^`]*`", "X", text)) for place, text in docstrings()]
    pattern = re.compile("|".join(PATTERNS.values()), re.IGNORECASE)
    found = [f"{place}: {met[0]}" for place, text in every if (met := pattern.search(text))]
    assert percentage(found, len(every)) <= DOCSTRINGS_MAX, "\n".join(found)


def test_a_private_name_has_few_homes() -> None:
    homes: defaultdict[str, set[Path]] = defaultdict(set)
    for path, module in modules().items():
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("_"):
                homes[node.name].add(path)
    assert len({name for name, paths in homes.items() if len(paths) >= 3}) <= HOMES_MAX


def test_the_check_finds_bad_prose() -> None:
    """A check that accepts everything would prove nothing."""
    bad = {
        "a clause in place of a noun": "What was sent has the fate of the writes.",
        "stands": "The partition stands until then.",
        "is told": "The listener is told of it.",
        "goes on": "The other partitions go on.",
        "nobody": "Nobody leads.",
        ", too": "The worker ends, too.",
        "so does": "So does the listener.",
        "of its own": "It has a queue of its own.",
        "where for if": "Where a handler fails, it halts.",
        "for good": "It is gone for good.",
    }
    assert [name for name, text in bad.items() if not re.search(PATTERNS[name], text, re.IGNORECASE)] == []
    good = "The listener stores changes of a blocked partition. If the handler fails, its partition halts."
    assert [name for name, pattern in PATTERNS.items() if re.search(pattern, good, re.IGNORECASE)] == []
