"""Makes changes in a checkout, all that was asked for or none; and lists them."""

from __future__ import annotations

from pathlib import Path

from omlx_admission.upstream import register
from omlx_admission.upstream.change import Refused
from omlx_admission.upstream.checkout import Checkout
from omlx_admission.upstream.plan import Step, Tree, is_in, plan


def make(root: Path, name: str, branch: str | None = None) -> None:
    """Make the change ``name`` (or ``all``) and those it stands on; print what was done.

    Raises:
        Refused: it cannot be made; branch, commits and files are as they were.
    """
    changes = register.select(name)
    checkout = Checkout(root)
    checkout.require_clean()
    if branch is None and not checkout.branch():
        raise Refused(f"{root} is on no branch, so nothing would keep the commits: --branch B")
    steps = plan(Tree(checkout.root), changes)
    todo = [step for step in steps if not step.already]
    for step in steps:
        if step.already:
            print(f"{step.change.name}: this oMLX does it already, nothing to do")
    if not todo:
        if branch is not None:
            print(f"branch {branch} is not created")
        return
    before, back = checkout.head(), checkout.branch()
    if branch is not None:
        checkout.create_branch(branch)
    try:
        done = [(step, _commit(checkout, step)) for step in todo]
    except BaseException:
        checkout.back_to(before)
        if branch is not None:
            checkout.leave_branch(branch, back)
        raise
    for step, statistics in done:
        print(f"{step.change.name}: {step.change.title}\n{statistics}")


def _commit(checkout: Checkout, step: Step) -> str:
    try:
        return checkout.commit(step.formatted(), step.change.commit_message())
    except Refused as error:
        raise Refused(f"{step.change.name}: {error}") from None


def show(root: Path) -> None:
    """Print each change, its title and its state in the checkout."""
    tree = Tree(Checkout(root).root)
    for name, change in register.changes().items():
        print(f"{name:<16} {_state(tree, name)}\n{'':<16} {change.title}")


def _state(tree: Tree, name: str) -> str:
    chosen = register.select(name)
    if is_in(tree, chosen[-1]):
        return "done"
    try:
        steps = plan(tree, chosen)
    except Refused as error:
        return f"does not fit: {str(error).removeprefix(f'{name}: ')}"
    brings = [step.change.name for step in steps[:-1] if not step.already]
    return "fits" + (f", with {', '.join(brings)}" if brings else "")
