"""A small server shaped like oMLX 0.6.3rc2, with its module paths and its defects.

It exists so that omlx-admission can be tested and shown where oMLX is not
installed. It is own code; where oMLX is known to misbehave, so does this, and
``tests/contract`` compares the two.
"""

from omlx._version import __version__

__all__ = ["__version__"]
