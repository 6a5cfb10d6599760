"""The shop, and the admin, with its pages of bridges and dead letters."""

from django.contrib import admin
from django.urls import path

from shop.views import shop

urlpatterns = [path("", shop, name="shop"), path("admin/", admin.site.urls)]
