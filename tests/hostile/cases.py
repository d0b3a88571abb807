"""The list of hostile files, and how one is added: a name after the rule it breaks, and an edit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostile_model import Model

Edit = Callable[[Model], None]
CASES: dict[str, tuple[str, Edit]] = {}  # name -> (form of the good file, edit)


def case(name: str, select: str = "all") -> Callable[[Edit], Edit]:
    """Decorator: the case ``name`` is the good file of this form after this edit."""

    def register(edit: Edit) -> Edit:
        CASES[name] = (select, edit)
        return edit

    return register


def key(name: str, key: str, kind: str, value: Any, select: str = "all") -> None:
    """A case in which a key under flash_ffn has another value."""
    CASES[name] = (select, lambda m: m.set(f"flash_ffn.{key}", kind, value))


def added(name: str, key: str, kind: str, value: Any, select: str = "all") -> None:
    """A case in which there is a key more."""
    CASES[name] = (select, lambda m: m.kv.append((key, kind, value)))


def attr(name: str, tensor: str, attr: str, value: Any, select: str = "all") -> None:
    """A case in which a tensor info has another field."""
    CASES[name] = (select, lambda m: setattr(m.tensor(tensor), attr, value))
