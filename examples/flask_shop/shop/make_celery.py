"""The Celery app, for `celery -A shop.make_celery`."""

from shop import create_app

celery_app = create_app().extensions["celery"]
