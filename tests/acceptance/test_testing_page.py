"""
`docs/testing.md` as a project: its tests pass with its handlers, and each mistake that it names fails its test.

One run of pytest in a process of its own, with the plugin as it is installed and embedded servers.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.acceptance.documentation.pages import ROOT, blocks
from tests.fixtures.availability import require_server
from tests.fixtures.process import Processes

PAGE = ROOT / "docs/testing.md"
_SECONDS_MAX = 600.0
_HANDLER = re.compile(r"^def summarise\(change\):\n.*?(?=^@bridge)", re.MULTILINE | re.DOTALL)
_WRITE = """
    order, key = change.full_document, {{"_id": change.document_key["_id"]}}
    summaries = change.fenced("shop.summaries")
    if order is None:
        summaries.delete_one(key)
        return
    {write}
"""

MISTAKES = {
    "test_a_repeated_execution_adds_nothing": _WRITE.format(
        write='summaries.update_one(key, {"$inc": {"total": order["total"]}}, upsert=True)'
    ),
    "test_a_stale_execution_takes_nothing_back": """
    order, key = change.full_document, change.document_key["_id"]
    if order is not None:
        bridge.client["shop"].summaries.replace_one({"_id": key}, {"total": order["total"]}, upsert=True)
""",
    "test_a_change_makes_no_further_change": """
    if change.full_document is not None:
        key, seen = change.document_key["_id"], change.full_document.get("seen", 0)
        bridge.client["shop"].orders.update_one({"_id": key}, {"$set": {"seen": seen + 1}})
""",
    "test_a_failure_is_retried": """
    order, key = change.full_document, {"_id": change.document_key["_id"]}
    try:
        total = order["total"] * rates.rate_of(order["currency"])
        change.fenced("shop.summaries").replace_one(key, {"total": total}, upsert=True)
    except Exception as error:
        print(error)
""",
    "test_an_order_that_is_gone_has_no_summary": """
    order, key = change.full_document, {"_id": change.document_key["_id"]}
    total = order["total"] * rates.rate_of(order["currency"])
    change.fenced("shop.summaries").replace_one(key, {"total": total}, upsert=True)
""",
    "test_a_transaction_has_all_its_writes": """
    from mongo_celery import transactional

    order, key, summaries = change.full_document, change.document_key["_id"], bridge.client["shop"].summaries
    try:
        with transactional(bridge.client):
            summaries.replace_one({"_id": key}, {"total": order["total"]}, upsert=True)
    except AssertionError:
        summaries.replace_one({"_id": key}, {"total": order["total"]}, upsert=True)
""",
}
"""What `summarise` does, by the test that finds it."""

CASE = {"_id": {"_data": "82"}, "operationType": "insert", "ns": {"db": "shop", "coll": "orders"}}
CASE |= {"documentKey": {"_id": {"$numberInt": "9"}}, "fullDocument": {"_id": {"$numberInt": "9"}, "total": 5}}
"""The dead letter that the page's reader has stored."""


def files() -> dict[str, str]:
    code = "".join(block.code for language in ("python", "toml") for block in blocks(PAGE, language))
    parts = re.split(r"^# (\S+\.(?:py|toml))\n", code, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def write_project(directory: Path) -> None:
    """The page's project, and beside it one for each mistake with the test that is to find it."""
    for path, text in files().items():
        _write(directory / path, text)
    _write(directory / "tests/case.json", json.dumps({"dead_letters": [{"event": CASE}]}))
    for number, (test, body) in enumerate(MISTAKES.items()):
        package, suite = f"shop_{number}", directory / f"mistake_{number}"
        for path, text in files().items():
            if path.startswith("shop/"):
                wrong = _HANDLER.sub(f"def summarise(change):{body}\n", text)
                _write(directory / path.replace("shop/", f"{package}/"), _renamed(wrong, package))
        _write(suite / "conftest.py", files()["tests/conftest.py"] + _bridges(package))
        page_tests = re.split(r"^(?=def test_)", files()["tests/test_mistakes.py"], flags=re.MULTILINE)
        (found,) = [each for each in page_tests if each.startswith(f"def {test}(")]
        _write(suite / f"test_mistake_{number}.py", _renamed(f"from shop import rates\n\n{found}", package))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _renamed(text: str, package: str) -> str:
    return text.replace("from shop", f"from {package}").replace('include=["shop.', f'include=["{package}.')


def _bridges(package: str) -> str:
    body = f"    from {package}.celery import bridge\n    return [bridge]\n"  # include=[...] has its handlers imported
    return f"\n@pytest.fixture\ndef mongo_celery_bridges():\n{body}"


def test_the_tests_of_the_page_pass_and_find_each_mistake(processes: Processes, tmp_path: Path) -> None:
    """A suite that never fails finds nothing: so each of these handlers is tried with the test that names it."""
    require_server("mongod")
    require_server("redis-server")
    write_project(tmp_path)
    directories = ["tests", *(f"mistake_{number}" for number in range(len(MISTAKES)))]
    arguments = ("-p", "no:randomly", "-p", "no:cacheprovider", "-q", "--junitxml=found.xml", "--import-mode=importlib")

    processes.python("pytest", "-m", "pytest", *directories, *arguments, directory=tmp_path).wait(_SECONDS_MAX)

    found = ET.parse(tmp_path / "found.xml")
    failed = {case.get("name") for case in found.iter("testcase") if case.find("failure") is not None}
    passed = {case.get("name") for case in found.iter("testcase") if len(case) == 0}
    written = set(re.findall(r"^def (test_\w+)", "".join(files().values()), re.MULTILINE))
    assert passed == written, ET.tostring(found.getroot()).decode()
    assert failed == set(MISTAKES)
