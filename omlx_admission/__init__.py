"""Cross-model admission for oMLX.

This module imports nothing: the ``.pth`` line reaches it in every process of
the environment, most of which never touch oMLX.
"""

__version__ = "0.1.0.dev0"
