"""TLS options of the MongoDB URL hold for every client: the listener's, the stream's, the workers', the commands'."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from pymongo import MongoClient

from mongo_celery.embedded import MongoServer
from mongo_celery.embedded.server import HOST
from tests.fixtures.availability import require_server
from tests.fixtures.forked import run_celery
from tests.fixtures.process import Processes, wait_for

Document = dict[str, Any]
Done = subprocess.CompletedProcess[str]

_SET = "rs0"
_APP = "tests.acceptance.cli_project"
_SECONDS_MAX = 120.0


class _TlsServer(MongoServer):
    """A member that speaks TLS only, and asks its clients for certificates of the same authority."""

    certificate: Path
    authority: Path

    def _arguments(self, directory: Path, port: int) -> list[str]:
        tls = ("--tlsMode", "requireTLS", "--tlsCertificateKeyFile", str(self.certificate))
        return [*super()._arguments(directory, port), *tls, "--tlsCAFile", str(self.authority)]


@dataclass(frozen=True, slots=True)
class Encrypted:
    """A set that is reached by TLS: its address, with and without what makes it possible."""

    address: str
    options: str

    @property
    def url(self) -> str:
        return f"{self.plain_url}&tls=true&{self.options}"

    @property
    def plain_url(self) -> str:
        return f"mongodb://{self.address}/?replicaSet={_SET}"


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    """Give a set of one member with a certificate of an authority that nobody else knows."""
    require_server("mongod")
    directory = tmp_path_factory.mktemp("tls")
    authority, client_file, server_file = (directory / name for name in ("ca.pem", "client.pem", "server.pem"))
    made = trustme.CA()
    made.cert_pem.write_to_path(str(authority))
    made.issue_cert(HOST).private_key_and_cert_chain_pem.write_to_path(str(server_file))
    made.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(str(client_file))
    server = _TlsServer(replica_set=_SET)
    server.certificate, server.authority = server_file, authority
    options = f"tlsCAFile={authority}&tlsCertificateKeyFile={client_file}"
    with server:
        direct = f"mongodb://{server.address}/?directConnection=true&tls=true&{options}"
        with MongoClient[Document](direct) as client:
            members = [{"_id": 0, "host": server.address}]
            client.admin.command("replSetInitiate", {"_id": _SET, "members": members})
            wait_for(lambda: client.admin.command("hello").get("isWritablePrimary"), message="there is a primary")
        yield Encrypted(server.address, options)


@pytest.fixture
def environment(encrypted: Encrypted, redis_url: str, state_name: str) -> Document:
    """Give what the app reads."""
    options = json.dumps({"partitions": 2, "lease_ttl": 2.0, "claim_ttl": 2.0, "start_timeout": 2.0})
    return {
        "PROJECT_MONGO": encrypted.url,
        "PROJECT_BROKER": redis_url,
        "PROJECT_NAMES": state_name,
        "PROJECT_OPTIONS": options,
    }


@pytest.fixture
def state_name(tmp_path: Path) -> str:
    return f"tls_{abs(hash(tmp_path.name)) % 10**8}"


def test_a_change_goes_the_whole_way_by_tls(encrypted: Encrypted, environment: Document, processes: Processes) -> None:
    """Lease, stream, claims, the handler's own write by `bridge.client`, status and check."""
    listener = processes.celery(_APP, "listener", "-l", "INFO", environment=environment)
    listener.wait_for_output("reading from")
    arguments = ("-P", "solo", "-l", "INFO", "--without-gossip", "--without-mingle")
    processes.celery(_APP, "worker", *arguments, environment=environment).wait_for_output("ready")
    names = environment["PROJECT_NAMES"]
    with MongoClient[Document](encrypted.url) as client:
        client[f"{names}_data"]["orders"].insert_one({"_id": 1})
        wait_for(lambda: client[f"{names}_data"]["summaries"].find_one({"_id": 1}), message="it was handled")
    status = json.loads(_changes(environment, "status", "--json").stdout)
    assert status["state"] == "leading"
    findings = {each["code"]: each for each in json.loads(_changes(environment, "check", "--json").stdout)["findings"]}
    assert {findings[name]["severity"] for name in ("topology", "state_rights", "change_stream", "mongodb_tls")} == {
        "ok"
    }


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        pytest.param("tls=true&", "MongoDB did not answer", id="plain text"),
        pytest.param("tlsCAFile", "certificate verify failed", id="an authority that is not known"),
    ],
)
def test_a_way_that_is_not_trusted_is_no_answer(
    encrypted: Encrypted, environment: Document, lacking: str, words: str
) -> None:
    """One sentence of the listener and of a command, which says what the matter is; status 1, of a verdict 2."""
    url = encrypted.plain_url if lacking == "tls=true&" else f"{encrypted.plain_url}&tls=true"
    if lacking != "tls=true&":
        url += f"&{encrypted.options.partition('&')[2]}"
    for command in (("changes", "status"), ("listener",))[: 1 + (lacking == "tlsCAFile")]:
        done = _run({**environment, "PROJECT_MONGO": url}, *command)
        assert done.returncode == (1 if command == ("listener",) else 2), done.stdout
        assert words in done.stdout + done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def _changes(environment: Document, *arguments: str) -> Done:
    return _run(environment, "changes", *arguments)


def _run(environment: Document, *arguments: str) -> Done:
    return run_celery("-A", _APP, *arguments, environment=environment)
