"""What is remembered of the queue and the pool, for people to look at."""
