"""Decisions and figures about the GPU: pure, without a clock."""
