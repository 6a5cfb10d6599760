"""Articles, of which there are so many, their orders, and what the page shows of these."""

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
    confirmed = models.BooleanField(default=False)

    def __str__(self) -> str:
        """Customer and article."""
        return f"{self.customer}: {self.article_id}"


class OrderCard(models.Model):  # type: ignore[misc]
    """An order as the page shows it, in one document with its order's key; only `changes.py` writes it."""

    customer = models.CharField(max_length=20)
    article = models.CharField(max_length=20)
    confirmed = models.BooleanField()

    def __str__(self) -> str:
        """Customer and article."""
        return f"{self.customer}: {self.article}"
