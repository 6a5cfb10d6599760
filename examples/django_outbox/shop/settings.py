"""Django's settings, as small as they can be."""

import os

SECRET_KEY = "not-a-secret-of-an-example"  # noqa: S105
DATABASES = {
    "default": {
        "ENGINE": "django_mongodb_backend",
        "HOST": os.environ.get("MONGO_URL", "mongodb://localhost:27017/?replicaSet=rs0"),
        "NAME": "shop",
    }
}
DATABASE_ROUTERS = ["django_mongodb_backend.routers.MongoRouter"]
DEFAULT_AUTO_FIELD = "django_mongodb_backend.fields.ObjectIdAutoField"
INSTALLED_APPS = ["shop"]
USE_TZ = True

CELERY_BROKER_URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")
