"""The pages of docs/operations that have code."""
