"""The admin pages in a Django project, which needs a process of its own: the checks are in `admin_checks.py`."""

from __future__ import annotations

from typing import Any

from pymongo.database import Database

from tests.fixtures.process import PATIENCE_SECONDS, ROOT, Processes


def test_admin_pages_show_and_do_what_the_commands_do_for_who_may(
    processes: Processes, database: Database[dict[str, Any]], mongo_url: str
) -> None:
    """Rights, forgery, escaping, and each action with its log; a failed check is in the output."""
    done = processes.python(
        "admin",
        *("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-q", "--tb=short", "--show-capture=no"),
        str(ROOT / "tests/integration/admin_checks.py"),
        environment={"ADMIN_MONGO_URL": mongo_url, "ADMIN_DATABASE": database.name},
    )
    assert done.wait(5 * PATIENCE_SECONDS) == 0, done.text
    assert " passed" in done.text
