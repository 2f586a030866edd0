"""Which oMLX this stands in for, and the flag that says it is not the real one."""

__version__ = "0.6.3rc2"

#: Real oMLX has no such name: tools ask ``getattr(omlx._version, "STANDIN", False)``.
STANDIN = True
