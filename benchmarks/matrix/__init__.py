"""Which releases the package was run on, and what came of it."""
