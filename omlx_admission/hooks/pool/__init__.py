"""The pool and its engines: which request is handed what, and what may leave."""
