"""Turns hooks into changes of oMLX itself: edits of a checkout, one commit each.

Nothing in here runs in a server. ``change`` says what a change is, ``editing``
and ``package`` are what its edit is made of, ``register`` finds the folders
of ``patches/``, ``plan`` computes what a change does to a checkout without
touching it, ``checkout`` is git.
"""
