"""Functions of somebody else's are replaced for one thread only, and come back."""

from __future__ import annotations

import threading

from microstrat import _patches


class Owner:
    def method(self) -> str:
        return "original"


def test_replacements_nest_and_end() -> None:
    original = Owner.method
    with _patches.replaced(Owner, "method", lambda below: lambda self: f"outer of {below(self)}"):
        with _patches.replaced(Owner, "method", lambda below: lambda self: f"inner of {below(self)}"):
            assert Owner().method() == "inner of outer of original"
        assert Owner().method() == "outer of original"
    assert Owner.method is original


def test_other_threads_have_the_original() -> None:
    entered, leave, heard = threading.Event(), threading.Event(), []

    def other() -> None:
        with _patches.replaced(Owner, "method", lambda below: lambda self: "theirs"):
            entered.set()
            leave.wait()
            heard.append(Owner().method())

    original = Owner.method
    thread = threading.Thread(target=other)
    with _patches.replaced(Owner, "method", lambda below: lambda self: "ours"):
        thread.start()
        entered.wait()
        assert Owner().method() == "ours"
    # The first to come has left, the other is still there.
    assert Owner().method() == "original"
    leave.set()
    thread.join()
    assert heard == ["theirs"]
    assert Owner.method is original
