"""
Django's side of bridges, outboxes and transactions: `"mongo_celery.contrib.django"` in INSTALLED_APPS.

It needs Django, and django-mongodb-backend only for what handles models that are stored in MongoDB. Nothing of Celery
or PyMongo is imported when Django starts, and nothing connects.
"""
