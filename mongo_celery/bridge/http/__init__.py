"""What a listener says of itself by HTTP, to probes, Prometheus and people: read-only, and apart from its work."""
