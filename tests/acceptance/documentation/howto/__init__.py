"""What the pages of `docs/howto` need, and what their code must have done."""
