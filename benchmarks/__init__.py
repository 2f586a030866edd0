"""Measurements of omlx-admission: ``python -m benchmarks``."""
