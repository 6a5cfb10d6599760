"""Document contents stay where they belong."""

from __future__ import annotations

import re
from base64 import b64decode
from typing import Any

from tests.rig.deployment import MakeDeployment

CONTENTS = "canary-contents-5b1d"


def _decoded(text: str) -> bytes:
    """What base64 in a text would hide."""
    found = b""
    for word in re.findall(r"[A-Za-z0-9+/]{40,}", text):
        for start in range(4):  # the beginning may be cut off, or belong to something else
            part = word[start:]
            found += b64decode(part[: len(part) // 4 * 4])
    return found


def test_contents_appear_in_dead_letters_alone(deployment: MakeDeployment) -> None:
    """At level DEBUG, with failures, retries and tracebacks. `test_secrets.py` looks for passwords and keys."""
    chain = deployment("plain", "letters")
    chain.listener(level="DEBUG")
    chain.worker(level="DEBUG")
    chain.write("plain", "a", 1, canary=CONTENTS)
    chain.allow(chain.write("plain", "b", 1, canary=CONTENTS, act="retry", options={"countdown": 0.1}))
    chain.give_up(chain.write("letters", "c", 1, canary=CONTENTS, act="raise", times=9))
    chain.give_up(chain.allow(chain.write("letters", "d", 1, canary=CONTENTS, act="retry", times=9), 2))
    chain.wait_done()
    chain.judge()
    for name, text in chain.logs.items():
        assert CONTENTS not in text, name
        assert CONTENTS.encode() not in _decoded(text), name
    with chain.broker as broker:
        keys: Any = broker.keys()
        assert not [key for key in keys if CONTENTS.encode() in key]
    for collection in ("leases", "handlers", "partitions"):
        assert CONTENTS not in repr([*chain.state[collection].find()])
    letters = chain.letters("letters")
    assert len(letters) == 2
    assert CONTENTS not in repr([{**letter, "change": None} for letter in letters])
