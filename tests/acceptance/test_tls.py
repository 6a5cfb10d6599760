"""TLS options of the MongoDB URL hold for every client: the listener's, the stream's, the workers', the commands'."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import trustme
from pymongo import MongoClient

from mongo_celery.embedded import MongoServer
from mongo_celery.embedded.server import HOST
from tests.fixtures.availability import require_server
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import Processes, wait_for
from tests.rig.project import OPTIONS, Project

Document = dict[str, Any]

_SET = "rs0"


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


class Shop(Project):
    """The app of `test_cli.py` on that set."""

    app = "tests.acceptance.cli_project"
    options = MappingProxyType({**OPTIONS, "partitions": 2, "lease_ttl": 20.0})


@pytest.fixture
def shop(encrypted: Encrypted, make_client: MakeClient, processes: Processes, redis_url: str) -> Iterator[Shop]:
    with Shop(processes, make_client(encrypted.url), encrypted.url, redis_url) as made:
        yield made


def test_a_change_goes_the_whole_way_by_tls(shop: Shop) -> None:
    """Lease, stream, claims, the handler's own write by `bridge.client`, status and check."""
    shop.listener()
    shop.worker("-P", "solo")
    shop.data["orders"].insert_one({"_id": 1})
    wait_for(lambda: shop.data["summaries"].find_one({"_id": 1}), message="it was handled")
    assert json.loads(shop.run("changes", "status", "--json").stdout)["state"] == "leading"
    found = json.loads(shop.run("changes", "check", "--json").stdout)["findings"]
    levels = {each["code"]: each["severity"] for each in found}
    assert {levels[name] for name in ("topology", "state_rights", "change_stream", "mongodb_tls")} == {"ok"}


def test_a_way_that_is_not_trusted_is_no_answer(encrypted: Encrypted, shop: Shop) -> None:
    """By plain text, and with an authority that is not known: the listener ends, and a verdict is failing."""
    soon = shop.variables({"start_timeout": 2.0})["PROJECT_OPTIONS"]
    unknown = f"{encrypted.plain_url}&tls=true&{encrypted.options.partition('&')[2]}"
    for url, command, status, word in (
        (encrypted.plain_url, ("changes", "status"), 2, encrypted.address),
        (unknown, ("changes", "status"), 2, "certificate"),
        (unknown, ("listener",), 1, "certificate"),
    ):
        done = shop.run(*command, PROJECT_MONGO=url, PROJECT_OPTIONS=soon)
        assert (done.returncode, word in done.stdout + done.stderr) == (status, True), done
        assert "Traceback" not in done.stderr
