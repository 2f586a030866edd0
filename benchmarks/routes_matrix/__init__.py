"""Every route by every outcome, stock beside patched, from real requests."""
