"""Containment: what stops one partition, or nothing, must not stop the bridge; a file a theme."""
