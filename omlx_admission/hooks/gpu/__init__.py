"""The GPU: one engine at a time, and what goes wrong on it."""
