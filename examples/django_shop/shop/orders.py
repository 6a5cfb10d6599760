"""Taking orders, in Django's own words."""

from django.db.models import F

from shop.celery import outbox
from shop.models import Article, Order
from shop.tasks import confirm


class SoldOutError(Exception):
    """There is none left."""


def place(customer: str, name: str) -> Order:
    """Two models and a task: all of it, or nothing. `atomic` is Django's, and takes in what is sent."""
    with outbox.atomic():
        article = Article.objects.get(name=name)
        order = Order.objects.create(customer=customer, article=article)
        confirm.delay(str(order.pk))
        if not Article.objects.filter(pk=article.pk, left__gt=0).update(left=F("left") - 1):
            raise SoldOutError(name)
    return order
