"""Articles, of which there are so many, and their orders."""

from django.db import models


class Article(models.Model):  # type: ignore[misc]
    """What can be ordered."""

    name = models.CharField(max_length=20, unique=True)
    left = models.IntegerField()

    def __str__(self) -> str:
        """Its name."""
        return str(self.name)


class Order(models.Model):  # type: ignore[misc]
    """Who has ordered what."""

    customer = models.CharField(max_length=20)
    article = models.ForeignKey(Article, on_delete=models.CASCADE)

    def __str__(self) -> str:
        """Customer and article."""
        return f"{self.customer}: {self.article_id}"


class Confirmation(models.Model):  # type: ignore[misc]
    """What was sent to a customer."""

    order = models.CharField(max_length=24, unique=True)

    def __str__(self) -> str:
        """The order that is confirmed."""
        return str(self.order)
