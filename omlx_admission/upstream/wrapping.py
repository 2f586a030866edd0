"""Comments, docstrings and texts within a line length: black leaves them as they are.

Only what is too long is wrapped: its last words move to the next line of the same
paragraph, and on from there.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize

#: ``name: what it is`` begins an item of a list; what follows it is indented further.
_ITEM = re.compile(r"\w+(?:, \w+)*: \S|[*-] ")

#: A line that is one string, as between the brackets round a long text.
_STRING = re.compile(r'(\s+f?)"((?:[^"\\]|\\.)+)"([,)]*)$')

_INDENT = 4

#: So few words are not left alone on a line.
_FEW = 3
_QUOTES = '"""'


def wrapped(text: str, length: int) -> str:
    """``text`` with comments, docstrings and strings wrapped at ``length`` columns."""
    lines = text.splitlines()
    if all(len(line) <= length for line in lines):
        return text
    blocks = [(*block, True) for block in _docstrings(text)]
    blocks += [(*block, False) for block in _comments(text)]
    for first, last, is_docstring in sorted(blocks, reverse=True):
        block = lines[first:last]
        if is_docstring and len(block) == 1 and len(block[0]) > length:
            head = _head(block[0])
            # Black would put the quotes back behind a text of one line.
            block = _wrap([block[0]], length)
            block[-1:] = [block[-1].removesuffix(_QUOTES), head + _QUOTES]
        lines[first:last] = _wrap(block, length)
    return "\n".join(_with_strings(lines, length)) + "\n"


def _comments(text: str) -> list[tuple[int, int]]:
    """Lines that hold one comment and nothing else, each run of them as first and end."""
    found: list[tuple[int, int]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or token.line[: token.start[1]].strip():
            continue
        row = token.start[0] - 1
        if found and found[-1][1] == row:
            found[-1] = found[-1][0], row + 1
        else:
            found.append((row, row + 1))
    return found


def _docstrings(text: str) -> list[tuple[int, int]]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert first.end_lineno is not None
            found.append((first.lineno - 1, first.end_lineno))
    return found


def _wrap(block: list[str], length: int) -> list[str]:
    done: list[str] = []
    todo = list(block)
    while todo:
        line = todo.pop(0)
        head = _head(line)
        if len(line) > length and line.endswith("---"):
            line = line[:length]  # a rule across the page
        at = line.rfind(" ", len(head), length + 1)
        if len(line) <= length or at < 0:
            done.append(line)
        elif todo and _goes_on(line, todo[0]):
            its = _head(todo[0])
            todo[0] = f"{its}{line[at + 1 :]} {todo[0][len(its) :]}"
            done.append(line[:at])
        else:
            if line.count(" ", at) < _FEW:
                at = _pause(line, length) or at
            deeper = _INDENT if _ITEM.match(line[len(head) :]) else 0
            todo.insert(0, head + " " * deeper + line[at + 1 :])
            done.append(line[:at])
    return done


def _pause(line: str, length: int) -> int:
    """The last place in its second half where the sentence of ``line`` pauses, else 0."""
    at = max(line.rfind(f"{mark} ", length // 2, length) for mark in ",;:.") + 1
    return at if line.count("(", 0, at) == line.count(")", 0, at) else 0


def _head(line: str) -> str:
    """What stands before the text of a line: its indentation and the comment's sign."""
    found = re.match(r"\s*(?:#:?\s*)?", line)
    assert found is not None
    return found.group()


def _goes_on(line: str, following: str) -> bool:
    """Whether ``following`` is of the same paragraph as ``line``."""
    head, its = _head(line), _head(following)
    text = following[len(its) :]
    if not text or text == _QUOTES or _ITEM.match(text):
        return False
    return its == head or (len(its) > len(head) and bool(_ITEM.match(line[len(head) :])))


def _with_strings(lines: list[str], length: int) -> list[str]:
    """``lines`` with strings split that are a line of their own."""
    done: list[str] = []
    todo = list(lines)
    while todo:
        line = todo.pop(0)
        found = _STRING.match(line) if len(line) > length else None
        at = _last_space(found[2], length - len(found[1]) - 2) if found else 0
        if not found or not at:
            done.append(line)
            continue
        head, text, tail = found.groups()
        done.append(f'{head}"{text[:at]}"')
        following = _STRING.match(todo[0]) if todo and not tail else None
        if following and following[1] == head:
            todo[0] = f'{head}"{text[at:]}{following[2]}"{following[3]}'
        else:
            todo.insert(0, f'{head}"{text[at:]}"{tail}')
    return done


def _last_space(text: str, length: int) -> int:
    """The place behind the last space in so much of ``text``, none within braces; else 0."""
    depth, at = 0, 0
    for index, letter in enumerate(text[:length]):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == " " and depth == 0:
            at = index + 1
    return at
