"""The HTTP server around the pool: requests, answers, our own routes."""
