"""The state database of one bridge, with the protocol's concerns."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo import MongoClient
from pymongo.client_session import ClientSession

from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.audit import COLLECTION as AUDIT
from mongo_celery.bridge.state.audit import AuditRecords
from mongo_celery.bridge.state.backlog import Backlog
from mongo_celery.bridge.state.claims import Claims
from mongo_celery.bridge.state.dead_letters import DeadLetters
from mongo_celery.bridge.state.leases import DROPS, Drops, Leases
from mongo_celery.bridge.state.partitions import Partitions
from mongo_celery.bridge.state.positions import Positions
from mongo_celery.bridge.state.replays import Replays
from mongo_celery.bridge.state.signing import SigningKeys
from mongo_celery.bridge.state.snapshots import Snapshots
from mongo_celery.bridge.state.subscriptions import Subscriptions
from mongo_celery.mongo.opening import open_session, start_session, with_majority

_TYPES: CodecOptions[dict[str, Any]] = CodecOptions(
    unicode_decode_error_handler="replace",
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)
"""Options with which user values in the state (times, texts, tokens with an `_id`) cannot prevent reading it."""


class Store:
    """
    All collections of a bridge's state: majority writes, majority reads, primary only.

    The concerns in the URL are for the user's data and do not apply. If a failover could roll back a lease or a claim,
    two holders could get the same fencing token.
    """

    def __init__(self, client: MongoClient[dict[str, Any]], options: BridgeOptions) -> None:
        self._client = client
        database = with_majority(client[options.database], _TYPES)
        bridge = options.name
        self.leases = Leases(database["leases"], bridge, options.lease_ttl)
        self.signing = SigningKeys(database, bridge, options.lease_ttl)
        self.drops = Drops(database[DROPS], bridge, options.lease_ttl)
        self.subscriptions = Subscriptions(database["handlers"], bridge, options.lease_ttl)
        self.partitions = Partitions(database["partitions"], bridge, options.lease_ttl)
        self.claims = Claims(database["partitions"], database["dead_letters"], options.claim_ttl)
        self.backlog = Backlog(database["backlog"], bridge, options.lease_ttl)
        self.snapshots = Snapshots(database["snapshots"], bridge, options.lease_ttl)
        self.replays = Replays(database["dead_letters"], database["partitions"], bridge, options.claim_ttl)
        self.dead_letters = DeadLetters(database["dead_letters"], bridge, options.lease_ttl)
        self.audit = AuditRecords(database[AUDIT], bridge, options.lease_ttl)
        self.positions = Positions(database, bridge, self.audit)

    def start_session(self) -> ClientSession:
        """Return a causally consistent session, which never reads older data than it has read or written before."""
        return start_session(self._client, causal_consistency=True)

    def open_session(self) -> AbstractContextManager[ClientSession]:
        """Open such a session for a block. An error in the block may renew the connections."""
        return open_session(self._client, causal_consistency=True)
