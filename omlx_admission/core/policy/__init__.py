"""Decisions, and nothing else: no asyncio, no threads, no clock."""
