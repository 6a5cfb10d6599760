"""A small shop: `celery -A shop ...` finds the app here."""

from shop.celery import app, bridge

__all__ = ["app", "bridge"]
