"""A mongod that asks for a login: what users without some right see."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Self

from pymongo import MongoClient

from mongo_celery.embedded import MongoServer
from tests.fixtures.process import wait_for

SET = "rs0"
_MILLISECONDS_MAX = 30_000


class GuardedMongo(MongoServer):
    """A replica set of one member with access control: a context manager."""

    def __init__(self) -> None:
        super().__init__(replica_set=SET)

    def start(self) -> Self:
        """Start, initiate, and create the administrator; afterwards the set accepts writes."""
        super().start()
        with MongoClient[dict[str, Any]](self.url, serverSelectionTimeoutMS=_MILLISECONDS_MAX) as client:
            # Both are allowed to whoever is on the machine, as long as there is no user.
            client.admin.command("replSetInitiate", {"_id": SET, "members": [{"_id": 0, "host": self.address}]})
            wait_for(lambda: client.admin.command("hello").get("isWritablePrimary"), message="the set has a primary")
            client.admin.command("createUser", "root", pwd="root", roles=["root"])
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def add_user(self, name: str, *rights: tuple[str, str]) -> str:
        """Create a user with these pairs of role and database, and return the address to log in with."""
        with MongoClient[dict[str, Any]](self.address_of("root")) as client:
            roles = [{"role": role, "db": database} for role, database in rights]
            client.admin.command("createUser", name, pwd=name, roles=roles)
        return self.address_of(name)

    def address_of(self, name: str) -> str:
        """The address of the set for a user whose password is its name."""
        return f"mongodb://{name}:{name}@{self.address}/?replicaSet={SET}&authSource=admin"

    def _arguments(self, directory: Path, port: int) -> list[str]:
        key = directory / "key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_text(secrets.token_hex(32), encoding="ascii")
        return [*super()._arguments(directory, port), "--keyFile", str(key)]
