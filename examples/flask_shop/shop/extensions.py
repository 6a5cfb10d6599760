"""What stands at module level, and is given to each app by the factory."""

from flask_pymongo import PyMongo

from mongo_celery import Bridge

mongo = PyMongo()
bridge = Bridge(name="shop")
# The listener delivers what a killed process has left behind; no beat is needed.
orders = bridge.outbox("orders", sweep_every=None)
