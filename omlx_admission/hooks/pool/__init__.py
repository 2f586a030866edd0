"""The pool and its engines: who is handed what, and what may leave."""
