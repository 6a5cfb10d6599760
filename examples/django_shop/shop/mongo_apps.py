"""Django's own applications with the keys that MongoDB has."""

from django.contrib.admin import apps as admin
from django.contrib.auth import apps as auth
from django.contrib.contenttypes import apps as contenttypes

KEY = "django_mongodb_backend.fields.ObjectIdAutoField"


class MongoAdminConfig(admin.AdminConfig):  # type: ignore[misc]
    default_auto_field = KEY


class MongoAuthConfig(auth.AuthConfig):  # type: ignore[misc]
    default_auto_field = KEY


class MongoContentTypesConfig(contenttypes.ContentTypesConfig):  # type: ignore[misc]
    default_auto_field = KEY
