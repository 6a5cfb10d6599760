"""How collections are opened."""

DEFAULT_DATABASE = "mongo_celery"
"""Where state is kept unless an option says otherwise."""
