"""Checkouts of oMLX with one change each, and whether the package takes them rightly.

The changes are generated: every name that a feature needs, changed in every way that the
kind of name allows, and some that nobody need mind. For each one the right verdict is
derived from the register of features, not from the gate that is under test.
"""
