"""`celery -A app locks`: who keeps documents locked, and the end of that."""

from __future__ import annotations

import json
import signal
from uuid import uuid4

import pytest
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.embedded.processes import ChildProcess
from mongo_celery.locking import select_for_update, transactional
from tests.acceptance.test_cli import Done, one_sentence, run
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.rights import STATE, UrlOf
from tests.integration.locking_rig import Document, held, hold_for_ever

APP = "tests.acceptance.transactions_cli_project"


def locks(mongo_url: str, *arguments: str, text: str = "") -> Done:
    environment = {"PROJECT_MONGO": mongo_url, "PROJECT_NAMES": "locks_cli"}
    return run("-A", APP, "locks", *arguments, environment=environment, text=text)


@pytest.fixture
def things(database: Database[Document]) -> Collection[Document]:
    database["things"].insert_one({"_id": 1})
    return database["things"]


@pytest.fixture
def holder(processes: Processes, things: Collection[Document], mongo_url: str) -> ChildProcess:
    """A process that holds the document, and stands still; its appName is the database's."""
    name = things.database.name
    program = ("-m", "tests.integration.locking_rig", f"{mongo_url}&appName={name}", name, hold_for_ever.__name__, "0")
    child = processes.python("holder", *program)
    wait_for(lambda: things.database["meetings"].find_one({"mark": "held"}), message="a holder")
    child.send(signal.SIGSTOP)
    return child


def test_a_holder_is_found_and_ended(things: Collection[Document], holder: ChildProcess, mongo_url: str) -> None:
    """Seen by everybody, ended by whoever says so, and not by a trial; its document is free then."""
    assert holder.running
    name = things.database.name
    listed = locks(mongo_url, "list", "--json").stdout.splitlines()
    [found] = [each for each in map(json.loads, listed) if each["application"] == name]  # others may be of other tests
    chosen = found["id"]
    assert (found["state"], found["connected"], found["own"]) == ("idle", True, True)

    tried = locks(mongo_url, "free", chosen, "--dry-run")
    assert (tried.returncode, tried.stdout.startswith(chosen)) == (0, True)
    refused = locks(mongo_url, "free", chosen, text="n\n")
    assert refused.returncode == 1
    assert "End these transactions?" in refused.stderr
    plain = locks(mongo_url, "list").stdout
    assert f"{chosen}  idle  " in plain
    assert f"{name} at {found['client']}, open for" in plain

    freed = locks(mongo_url, "free", chosen, "--yes", "--json")
    assert freed.returncode == 0, freed.stderr
    assert json.loads(freed.stdout)["transactions"][0]["result"] == "freed"
    assert transactional(things.database.client)(select_for_update)(things, {"_id": 1}, nowait=True)
    one_sentence(locks(mongo_url, "free", chosen, "--yes"), f"no transaction {chosen} is open", "locks list")


def test_only_the_dead_are_ended_by_dead(things: Collection[Document], make_client: MakeClient, mongo_url: str) -> None:
    """A holder whose connection is there is not one of them."""
    name = things.database.name
    with held(make_client(appName=name)[name]["things"], 1):
        done = locks(mongo_url, "free", "--dead", "--yes")
        assert (done.returncode, name in done.stderr) == (0, False)
        assert name in locks(mongo_url, "list").stdout


@pytest.mark.slow
def test_the_dead_are_watched_and_ended(things: Collection[Document], mongo_url: str, holder: ChildProcess) -> None:
    """With the real times; it says for what it waits."""
    holder.kill()
    name = things.database.name

    def lost() -> bool:
        listed = map(json.loads, locks(mongo_url, "list", "--json").stdout.splitlines())
        return [each["state"] for each in listed if each["application"] == name] == ["lost"]

    wait_for(lost, message="a client that is gone")
    done = locks(mongo_url, "free", "--dead", "--yes", "--json")
    assert "without a connection for 10 s" in done.stderr
    [freed] = [each for each in json.loads(done.stdout)["transactions"] if each["application"] == name]
    assert (freed["state"], freed["result"]) == ("dead", "freed")
    assert transactional(things.database.client)(select_for_update)(things, {"_id": 1}, nowait=True)


@pytest.mark.parametrize("arguments", [["free"], ["free", "--dead", "1a"]], ids=" ".join)
def test_what_is_to_be_ended_is_named_in_one_way(mongo_url: str, arguments: list[str]) -> None:
    done = locks(mongo_url, *arguments)
    assert done.returncode == 2
    assert "name transactions by their ids, or those of dead clients with --dead" in done.stderr


def test_an_app_is_not_needed_where_a_url_is_given(things: Collection[Document], mongo_url: str) -> None:
    """And without either it is said what is missing."""
    with held(things, 1):
        assert "idle" in run("locks", "list", "--url", mongo_url).stdout
    one_sentence(run("locks", "list"), "celery -A shop locks list", "--url")
    one_sentence(run("-A", "tests.acceptance.locking_project", "locks", "list"), "no Bridge, Outbox", "--url")


def test_a_url_that_is_none_is_told_without_its_password() -> None:
    done = run("locks", "list", "--url", "mongodb://hush:se/cret@somewhere")
    one_sentence(done, "--url is no URL of a MongoDB")
    assert "cret" not in done.stderr


def test_the_transactions_of_others_are_named_as_what_is_missing(guarded_url: UrlOf, make_client: MakeClient) -> None:
    """Who may not see them is told so; who may see and end them does."""
    other: MongoClient[Document] = make_client(guarded_url("bridge"), appName=f"other {uuid4().hex}")
    locked = other[STATE]["locks_cli"]
    locked.replace_one({"_id": 1}, {}, upsert=True)
    with other.start_session() as session:
        session.start_transaction()
        select_for_update(locked, {"_id": 1}, session=session)
        blind = run("locks", "list", "--url", guarded_url("without_oplog"))
        assert blind.returncode == 0, blind.stderr
        assert "needs inprog on the cluster" in blind.stderr
        assert "other " not in blind.stdout
        seeing = run("locks", "list", "--url", guarded_url("admin"), "--json")
        [found] = [json.loads(line) for line in seeing.stdout.splitlines() if "other " in line]
        assert (found["own"], seeing.stderr) == (False, "")
        freed = run("locks", "free", found["id"][:13], "--url", guarded_url("admin"), "--yes")
        assert freed.stdout == f"{found['id']}: ended; what it held is free\n"
