"""Replacing a function of somebody else's for a while, for the calls of one thread.

The function is patched while some thread needs it; calls of other threads go to the original.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

Make = Callable[[Callable[..., Any]], Callable[..., Any]]

_lock = threading.Lock()
_users: dict[tuple[Any, str], int] = {}
_originals: dict[tuple[Any, str], Any] = {}
_thread = threading.local()

CALLS_BETWEEN = 1
"""Calls of Python that stand between a caller and the replacement."""


def _replacements(key: tuple[Any, str]) -> list[Any]:
    if not hasattr(_thread, "replacements"):
        _thread.replacements = {}
    return _thread.replacements.setdefault(key, [])


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Make) -> Iterator[None]:
    """Makes calls of `owner.name` on this thread go to `make(what it has been so far)`; `owner` is a class or module."""
    key = (owner, name)
    with _lock:
        _users[key] = _users.get(key, 0) + 1
        if _users[key] == 1:
            _originals[key] = getattr(owner, name)
            setattr(owner, name, _dispatching(key, _originals[key]))
        original = _originals[key]
    stack = _replacements(key)
    stack.append(make(stack[-1] if stack else original))
    try:
        yield
    finally:
        stack.pop()
        with _lock:
            _users[key] -= 1
            if not _users[key]:
                setattr(owner, name, _originals.pop(key))


def _dispatching(key: tuple[Any, str], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        stack = _replacements(key)
        return (stack[-1] if stack else original)(*args, **kwargs)

    return call
