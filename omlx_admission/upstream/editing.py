"""Edits of one module, anchored on names: what is not touched stays byte for byte.

Every function takes a module and returns the edited one, or raises
:class:`AnchorMissing`. Code that is put in is formatted where it lands
(:mod:`~omlx_admission.upstream.style`); nothing else is formatted. What says
*everywhere* takes all functions and classes, at any depth, whose dotted name ends
with ``name``; the others take the one definition of that name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence

from omlx_admission.upstream import style
from omlx_admission.upstream.change import AnchorMissing
from omlx_admission.upstream.code import (
    Code,
    Definition,
    Splice,
    docstring_of,
    everywhere,
    find,
    function,
    has,
    same,
)

# --- statements of a function ------------------------------------------------------------


def insert_first(code: Code, names: str | Sequence[str], new: str) -> Code:
    """Put statements at the start of a function or of several, after the docstring."""
    names = [names] if isinstance(names, str) else names
    nodes = [function(code, name) for name in names]
    return code.spliced(*(_put(_start(code, node), new, node) for node in nodes))


def insert_last(code: Code, name: str, new: str) -> Code:
    """Put statements at the end of a function, whose last statement must not leave it."""
    node = function(code, name)
    last = code.body(node)[-1]
    if isinstance(last, ast.Return | ast.Raise):
        raise AnchorMissing(f"{name} ends with a return or raise")
    return code.spliced(_put(code.after(last), new, node))


def insert_after_assignment(code: Code, name: str, target: str, new: str) -> Code:
    """Put statements behind the one in the body of ``name`` that assigns ``target``."""
    node = function(code, name)
    found = _the_one(code.body(node), lambda s: _assigns(s, target), f"{name}: {target}")
    return code.spliced(_put(code.after(found), new, node))


def insert_before_statement(code: Code, name: str, statement: str, new: str) -> Code:
    """Put statements before the one in the body of ``name`` that says ``statement``."""
    node = function(code, name)
    found = _the_one(code.body(node), _says(statement), f"{name}: {statement}")
    return code.spliced(_put(code.above(found), new, node))


def replace_statement(code: Code, name: str, old: str, new: str) -> Code:
    """Put other statements in the place of the one in the body of ``name`` that is ``old``.

    Without a name it is one of the module's.
    """
    node = function(code, name) if name else code.tree
    found = _the_one(code.body(node), _says(old), f"{name or 'the module'}: {old}")
    start, _, text = _put(code.at(found), new, node)
    return code.spliced((start, code.after(found), text))


def replace_expression(code: Code, name: str, old: str, new: str) -> Code:
    """Replace the one expression within a function that says ``old``."""
    wanted = ast.parse(old, mode="eval").body
    found = [n for n in ast.walk(function(code, name)) if same(n, wanted)]
    if len(found) != 1:
        raise AnchorMissing(f"{name}: {old} is there {len(found)} times, expected once")
    return code.spliced(*_replaced(code, found, new))


def _put(at: int, new: str, node: Definition | ast.Module) -> Splice:
    """Statements for the body of ``node``."""
    return at, at, style.statements(new, _depth(node.body[0]))


def _depth(statement: ast.stmt) -> int:
    return statement.col_offset // style.INDENT


def _start(code: Code, node: Definition) -> int:
    """Where the body begins, behind the docstring."""
    body = code.body(node)
    return code.after(body[0]) if docstring_of(body) else code.above(body[0])


def _the_one(
    body: Sequence[ast.stmt], is_it: Callable[[ast.stmt], bool], what: str
) -> ast.stmt:
    found = [statement for statement in body if is_it(statement)]
    if len(found) != 1:
        raise AnchorMissing(f"{what} is there {len(found)} times, expected once")
    return found[0]


def _says(text: str) -> Callable[[ast.AST], bool]:
    (wanted,) = ast.parse(text).body
    return lambda node: same(node, wanted)


def _assigns(statement: ast.stmt, target: str) -> bool:
    targets: list[ast.expr] = getattr(statement, "targets", [])
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return any(ast.unparse(one) == target for one in targets)


def _replaced(code: Code, nodes: Sequence[ast.AST], new: str) -> list[Splice]:
    return [(*code.span(n), new) for n in nodes if isinstance(n, ast.expr)]


# --- everywhere --------------------------------------------------------------------------


def _within(code: Code, name: str) -> Iterator[ast.AST]:
    """All nodes in the definitions ``name``, each once."""
    found = {id(node): node for one in everywhere(code, name) for node in ast.walk(one)}
    yield from found.values()


def insert_beside(
    code: Code, name: str, statement: str, new: str, *, before: bool = False
) -> Code:
    """Put statements behind (or before) each ``statement``, everywhere.

    ``(...)`` in ``statement`` stands for any arguments of a call.
    """
    says = _says(statement)
    found = [n for n in _within(code, name) if isinstance(n, ast.stmt) and says(n)]
    if not found:
        raise AnchorMissing(f"{name}: no statement {statement}")
    places = [(code.above(n) if before else code.after(n), _depth(n)) for n in found]
    return code.spliced(*((at, at, style.statements(new, depth)) for at, depth in places))


def insert_in_handlers(
    code: Code, name: str, exception: str, new: str, *, needed: bool = True
) -> Code:
    """Put statements first in each ``except exception``, everywhere.

    ``{}`` in ``new`` is the exception's name; a handler without one gets it. Where not
    ``needed``, a module without such a handler stays as it is.
    """
    splices: list[Splice] = []
    for handler in _within(code, name):
        kind = handler.type if isinstance(handler, ast.ExceptHandler) else None
        if kind is None or ast.unparse(kind) != exception:
            continue
        assert isinstance(handler, ast.ExceptHandler)
        first = code.body(handler)[0]
        if handler.name is None:
            end = code.span(kind)[1]
            splices.append((end, end, " as e"))
        at = code.above(first)
        # What only said that nothing is done goes.
        only = isinstance(first, ast.Pass) and at == code.at(first)
        text = style.statements(new.format(handler.name or "e"), _depth(first))
        splices.append((at, code.after(first) if only else at, text))
    if needed and not splices:
        raise AnchorMissing(f"{name}: no handler of {exception}")
    return code.spliced(*splices)


def replace_callee(code: Code, name: str, old: str, new: str) -> Code:
    """Call ``new`` where ``old`` is called, everywhere."""
    wanted = ast.parse(old, mode="eval").body
    calls = (n for n in _within(code, name) if isinstance(n, ast.Call))
    found = [call.func for call in calls if same(call.func, wanted)]
    if not found:
        raise AnchorMissing(f"{name}: no call of {old}")
    return code.spliced(*_replaced(code, found, new))


def decorate_everywhere(code: Code, name: str, decorator: str) -> Code:
    """Put a decorator innermost round these functions."""
    places = [code.line(node.lineno) for node in everywhere(code, name)]
    indents = [" " * node.col_offset for node in everywhere(code, name)]
    return code.spliced(
        *(
            (at, at, f"{indent}@{decorator}\n")
            for at, indent in zip(places, indents, strict=True)
        )
    )


# --- functions and definitions -----------------------------------------------------------


def decorate(code: Code, name: str, decorator: str) -> Code:
    """Put a decorator outermost round a function or method."""
    node = function(code, name)
    at = code.at(node)
    return code.spliced((at, at, f"{' ' * node.col_offset}@{decorator}\n"))


def insert_method(code: Code, new: str, *, after: str) -> Code:
    """Put a method behind the method ``after`` (``Class.method``)."""
    at = code.after(function(code, after))
    return code.spliced((at, at, "\n" + style.statements(new, 1, "class")))


def split_function(code: Code, name: str, *, head: str, rest: str, doc: str) -> Code:
    """Split a function after its docstring: ``head`` is its new body, ``rest`` takes the old.

    ``rest`` has the same parameters and stands right behind, so that not one line of
    the old body moves or changes. ``doc`` is its docstring.
    """
    node = function(code, name)
    start = _start(code, node)
    signature = code.part(code.line(node.lineno), code.above(node.body[0]))
    signature = re.sub(rf"\bdef {node.name}\b", f"def {rest}", signature, count=1)
    _, _, public = _put(start, head, node)
    _, _, docstring = _put(start, f'"""{doc}"""', node)
    return code.spliced((start, start, f"{public}\n{signature}{docstring}"))


def insert_before_definition(code: Code, name: str, new: str) -> Code:
    """Put a definition before the top-level one of ``name``."""
    at = code.above(find(code, name))
    return code.spliced((at, at, "\n\n" + style.statements(new, 0)))


def append_definitions(code: Code, new: str) -> Code:
    """Put definitions at the end of the module."""
    at = len(code.content)
    return code.spliced((at, at, "\n\n" + style.statements(new, 0)))


def insert_after_definition(code: Code, target: str, new: str) -> Code:
    """Put statements behind the one statement of the module that assigns ``target``."""
    found = _the_one(code.tree.body, lambda s: _assigns(s, target), f"assignment to {target}")
    at = code.after(found)
    return code.spliced((at, at, style.statements(new, 0)))


# --- one entry more ----------------------------------------------------------------------


def insert_field(code: Code, name: str, new: str) -> Code:
    """Put statements behind the last annotated field of the class ``name``."""
    node = find(code, name)
    fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
    if not fields:
        raise AnchorMissing(f"{name} has no fields")
    return code.spliced(_put(code.after(fields[-1]), new, node))


def add_keyword(code: Code, name: str, callee: str, keyword: str, value: str) -> Code:
    """Give the call of ``callee`` in the function ``name`` a keyword, laid out as its last.

    A call that ends with ``**`` something passes all that there is already.
    """
    calls = [n for n in _within(code, name) if isinstance(n, ast.Call)]
    calls = [n for n in calls if ast.unparse(n.func) == callee and (n.args or n.keywords)]
    if len(calls) != 1:
        raise AnchorMissing(f"{name}: {len(calls)} calls of {callee}, expected one")
    (call,) = calls
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    last = max(arguments, key=code.span)
    if isinstance(last, ast.keyword) and last.arg is None:
        return code
    return code.spliced(_one_more(code, code.span(last), f"{keyword}={value}"))


def add_entry(code: Code, name: str, key: str, value: str) -> Code:
    """Give the one dict in the function ``name`` one more entry, laid out as its last."""
    dicts = [n for n in _within(code, name) if isinstance(n, ast.Dict) and len(n.keys) > 1]
    if len(dicts) != 1:
        raise AnchorMissing(f"{name}: {len(dicts)} dicts, expected one")
    key_node, end = dicts[0].keys[-1], code.span(dicts[0].values[-1])
    start = end[0] if key_node is None else code.span(key_node)[0]
    return code.spliced(_one_more(code, (start, end[1]), f'"{key}": {value}'))


def _one_more(code: Code, last: tuple[int, int], new: str) -> Splice:
    """Behind the last entry, on a line of its own where that one is."""
    start, end = last
    before = code.content[:start].rpartition(b"\n")[2].decode()
    lone = not before.strip(" *")
    comma = re.match(rb"\s*,", code.content[end:])
    if comma:
        end += comma.end()
    text = "" if comma else ","
    text += f"\n{before.replace('*', ' ')}{new}" if lone else f" {new}"
    return end, end, text + ("," if comma else "")


# --- imports -----------------------------------------------------------------------------


def import_name(code: Code, source: str, name: str) -> Code:
    """Import ``name`` from ``source`` (relative, as written), with what is imported from
    there already; else behind the other imports of the module's top."""
    imports = [s for s in code.tree.body if isinstance(s, ast.Import | ast.ImportFrom)]
    for one in imports:
        if isinstance(one, ast.ImportFrom) and "." * one.level + (one.module or "") == source:
            names = {ast.unparse(alias) for alias in one.names} - {"*"}
            if names:
                text = ", ".join(sorted(names | {name}, key=_by_kind))
                text = style.statements(f"from {source} import {text}", 0)
                return code.spliced((code.at(one), code.after(one), text))
    line = f"from {source} import {name}"
    try:
        return add_import(code, line)
    except AnchorMissing:
        if not imports:
            raise
    at = code.after(imports[-1])
    return code.spliced((at, at, "\n" + style.statements(line, 0)))


def _by_kind(name: str) -> tuple[int, str]:
    """Import sorting puts constants first, then classes, then the rest."""
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return kind, name


def add_import(code: Code, line: str, *, within: str = "") -> Code:
    """Add ``from .x import y`` where import sorting wants it; nothing if it is there.

    ``within`` is a function that imports late, to which it is added instead.
    """
    body = code.body(function(code, within)) if within else code.tree.body
    (new,) = ast.parse(line).body
    key = _import_key(new)
    if key is None:
        raise ValueError(f"{line!r} is no relative from-import")
    if any(same(statement, new) for statement in body):
        return code
    block: list[tuple[tuple[int, str], ast.stmt]] = []
    for statement in body:
        if (its := _import_key(statement)) is not None:
            block.append((its, statement))
        elif block:
            break
    if not block:
        raise AnchorMissing("no relative import to put another one beside")
    later = next((statement for its, statement in block if its > key), None)
    if later is None:
        at = code.after(block[-1][1])
    elif later is block[0][1]:
        # The blank line, or the comment, above the block stays above the block.
        at = code.at(later)
    else:
        at = code.above(later)
    return code.spliced((at, at, style.statements(line, _depth(body[0]))))


def _import_key(statement: ast.stmt) -> tuple[int, str] | None:
    if not isinstance(statement, ast.ImportFrom) or not statement.level:
        return None
    # Sorting puts `..x` before `.x`, and within one level goes by name.
    return -statement.level, statement.module or ""


# --- docstrings --------------------------------------------------------------------------
# One that is not there, or says it otherwise, is left as it is: no change fails for the
# words round it.


def reword(code: Code, name: str, old: str, new: str) -> Code:
    """Say ``new`` where the docstring of the function ``name`` says ``old``, once."""
    return _redocumented(
        code, name, lambda text: text.replace(old, new) if text.count(old) == 1 else text
    )


def add_raises(code: Code, name: str, line: str) -> Code:
    """Put ``line`` last into the section ``Raises:`` of a docstring that ends with it."""

    def change(text: str) -> str:
        found = re.search(r"\n( *)Raises:\n(?:\1 +.*\n)+ *\"{3}$", text)
        if found is None:
            return text
        end = text.rindex("\n")
        return f"{text[:end]}\n{found.group(1)}    {line}{text[end:]}"

    return _redocumented(code, name, change)


def _redocumented(code: Code, name: str, change: Callable[[str], str]) -> Code:
    docstring = docstring_of(function(code, name).body) if has(code, name) else None
    if docstring is None:
        return code
    span = code.span(docstring)
    return code.spliced((*span, change(code.part(*span))))
