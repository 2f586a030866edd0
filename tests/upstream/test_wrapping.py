"""Comments, docstrings and texts that are too long for oMLX; edits of its docstrings."""

from __future__ import annotations

import ast

import libcst as cst
import pytest

from omlx_admission.upstream import docstrings, style
from omlx_admission.upstream.wrapping import wrapped

LONG = '''
def f():
    """Say in one line what it is for: more than there is room."""


class C:
    """A class.

    Attributes:
        name: a text of which the end does not fit
            into its line.
        kind: another one that has one word too many
        last: one.
    """

    # One two three four five six seven eight nine ten
    # eleven.
    x = (
        f"one two three four five {'six seven eight'} nine ten "
        f"eleven"
    )
    # --- a part -------------------------------------------
'''

SHORT = '''
def f():
    """Say in one line what it is for: more
    than there is room.
    """


class C:
    """A class.

    Attributes:
        name: a text of which the end does
            not fit into its line.
        kind: another one that has one word
            too many
        last: one.
    """

    # One two three four five six seven
    # eight nine ten eleven.
    x = (
        f"one two three four five "
        f"{'six seven eight'} nine ten "
        f"eleven"
    )
    # --- a part ---------------------------
'''


def test_few_words_are_not_left_alone() -> None:
    text = "# One two three four five, six seven eight nine.\n"
    assert wrapped(text, 44) == "# One two three four five,\n# six seven eight nine.\n"


def test_what_is_too_long_is_wrapped_and_says_the_same() -> None:
    done = wrapped(LONG, 44)
    assert done == SHORT
    assert max(map(len, done.splitlines())) <= 44
    assert wrapped(done, 44) == done
    before, after = ast.parse(LONG), ast.parse(done)
    for old, new in zip(ast.walk(before), ast.walk(after), strict=True):
        assert type(old) is type(new)


def test_what_fits_stays_as_it_is() -> None:
    assert wrapped(LONG, 88) == LONG


@pytest.mark.parametrize("line", [f"x = 'no_space{'y' * 90}'", "#" + "z" * 90])
def test_what_cannot_be_broken_stays(line: str) -> None:
    assert wrapped(line + "\n", 88) == line + "\n"


def test_what_is_put_in_is_wrapped_where_it_lands() -> None:
    words = "word " * 15 + "word."
    for depth in (0, 2):
        code = cst.Module(style.statements(f"# {words}\npass", depth)).code
        assert len(code.splitlines()) == 2 + (depth > 0)


DOC = '''
class C:
    def f(self):
        """Do it.

        It is done under a lock at once.

        Raises:
            KeyError: If it is
                not there.
        """
        return 1

    def g(self):
        """Raises: nothing."""

    def h(self):
        return 2
'''


def test_words_of_a_docstring_are_replaced_where_they_are() -> None:
    module = cst.parse_module(DOC)
    done = docstrings.reword(module, "C.f", "under a lock ", "")
    assert done.code == DOC.replace("under a lock ", "")
    for name, words in (("C.f", "other words"), ("C.f", "it"), ("C.h", "a lock"), ("C.i", "x")):
        assert docstrings.reword(module, name, words, "x").code == DOC


def test_an_error_more_comes_last_of_those_that_are_raised() -> None:
    module = cst.parse_module(DOC)
    done = docstrings.add_raises(module, "C.f", "ValueError: If it is wrong")
    last = "                not there.\n"
    assert done.code == DOC.replace(last, f"{last}            ValueError: If it is wrong\n")
    for name in ("C.g", "C.h"):
        assert docstrings.add_raises(module, name, "ValueError: If").code == DOC
