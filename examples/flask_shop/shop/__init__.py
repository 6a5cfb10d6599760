"""
The application factory of the shop.

    flask --app shop run
    celery -A shop.make_celery listener
    celery -A shop.make_celery worker
"""

import os
from typing import Any

import mongoengine
from flask import Flask

from mongo_celery.contrib.flask import celery_init_app
from shop.extensions import bridge, mongo
from shop.pages import pages


def create_app(config: dict[str, Any] | None = None) -> Flask:
    """A Flask app with its Celery app, to which the bridge is bound."""
    app = Flask(__name__)
    app.config.from_mapping(
        MONGO_URI=os.environ.get("MONGO_URL", "mongodb://localhost:27017/shop?replicaSet=rs0"),
        CELERY={
            "broker_url": os.environ.get("REDIS_URL", "redis://localhost:6379/0"),
            "include": ["shop.tasks", "shop.changes"],
        },
        LEAST_STOCK=8,
    )
    app.config.from_mapping(config or {})
    mongo.init_app(app)
    mongoengine.connect(host=app.config["MONGO_URI"], connect=False, uuidRepresentation="standard")
    bridge.init_app(celery_init_app(app))
    app.register_blueprint(pages)
    return app
