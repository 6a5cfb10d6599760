"""A project whose handlers record what happens to them; environment and documents say how they behave."""
