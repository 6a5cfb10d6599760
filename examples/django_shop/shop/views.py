"""The shop's one page: what was ordered, and a form to order more."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from shop.models import Article, OrderCard
from shop.orders import SoldOutError, place


def shop(request: HttpRequest) -> HttpResponse:
    """Show the cards, or take an order. Nothing here waits for a broker, a worker or a listener."""
    said, status = "", 200
    if request.method == "POST":
        try:
            place(request.POST.get("customer", "")[:20], request.POST.get("article", ""))
        except SoldOutError:
            said, status = "Sold out.", 409
        except Article.DoesNotExist:
            said, status = "There is no such article.", 404
        else:
            return redirect("shop")
    page = {"said": said, "articles": Article.objects.all(), "cards": OrderCard.objects.order_by("customer")}
    return render(request, "shop/shop.html", page, status=status)
