"""The GPU: whose turn it is, what goes wrong on it, and how long it was exposed."""
