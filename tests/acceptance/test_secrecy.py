"""Passwords and document contents stay where they belong."""

from __future__ import annotations

import re
from base64 import b64decode
from pathlib import Path
from typing import Any

from pymongo import MongoClient

from tests.rig.deployment import Deployment

Document = dict[str, Any]
CONTENTS = "canary-contents-5b1d"
PASSWORD = "canary-password-77aa"


def _decoded(text: str) -> bytes:
    """What base64 in a text would hide."""
    found = b""
    for word in re.findall(r"[A-Za-z0-9+/]{40,}", text):
        for start in range(4):  # the beginning may be cut off, or belong to something else
            part = word[start:]
            found += b64decode(part[: len(part) // 4 * 4])
    return found


def test_neither_password_nor_contents_appear_in_logs_keys_or_state(
    mongo_client: MongoClient[Document], mongo_url: str, tmp_path: Path
) -> None:
    """At level DEBUG, with failures, retries and tracebacks; a dead letter is the one place for contents."""
    user = f"user_{tmp_path.name}"[:30]
    mongo_client.admin.command("createUser", user, pwd=PASSWORD, roles=["root"])
    secret_url = mongo_url.replace("mongodb://", f"mongodb://{user}:{PASSWORD}@").replace("/?", "/?authSource=admin&")
    try:
        with Deployment(mongo_client, secret_url, tmp_path, handlers=["plain", "letters"]) as chain:
            listener = chain.run("listener", name="listener", level="DEBUG")
            chain.worker(level="DEBUG")
            listener.wait_for_output("reading from")
            chain.write("plain", "a", 1, canary=CONTENTS)
            chain.allow(chain.write("plain", "b", 1, canary=CONTENTS, act="retry", options={"countdown": 0.1}))
            chain.give_up(chain.write("letters", "c", 1, canary=CONTENTS, act="raise", times=9))
            chain.give_up(chain.allow(chain.write("letters", "d", 1, canary=CONTENTS, act="retry", times=9), 2))
            chain.wait_done()
            chain.judge()
            found = chain.state["bridge_keys"].find_one({"_id": "chain"})
            assert found is not None
            key = bytes(found["key"])
            for name, text in chain.logs.items():
                assert CONTENTS not in text, name
                assert CONTENTS.encode() not in _decoded(text), name
                assert PASSWORD not in text, name
                assert key.hex() not in text, name
                assert repr(key)[2:-1] not in text, name
            with chain.broker as broker:
                keys: Any = broker.keys()
                assert not [key for key in keys if CONTENTS.encode() in key]
            for collection in ("leases", "handlers", "partitions"):
                for document in chain.state[collection].find():
                    assert CONTENTS not in repr(document)
                    assert PASSWORD not in repr(document)
            for letter in chain.letters("letters"):
                rest = {name: value for name, value in letter.items() if name != "change"}
                assert CONTENTS not in repr(rest)
                assert PASSWORD not in repr(letter)
    finally:
        mongo_client.admin.command("dropUser", user)
