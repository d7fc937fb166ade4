"""The package's layers: imports go one way, and private TensorFlow names stand in one module."""

from __future__ import annotations

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "microstrat"
# Each may import those after it.
LAYERS = [
    "__init__", "_scope", "_strategy", "_explain", "_extended", "_inputs", "_loops", "_replay", "_lower", "_conditionals",
    "_eager", "_trace", "_variables", "_whole", "_tracing", "_context", "_arguments", "_values", "_rows", "_lift",
    "_real", "_degrees", "_kinds", "_plan", "_keras", "_tf", "_patches", "_errors",
]  # fmt: skip


def imports(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_module_has_its_layer() -> None:
    assert sorted(path.stem for path in PACKAGE.glob("*.py")) == sorted(LAYERS)


@pytest.mark.parametrize("module", LAYERS)
def test_imports_go_one_way(module: str) -> None:
    own = {name.split(".")[1] for name in imports(PACKAGE / f"{module}.py") if name.startswith("microstrat.")}
    below = set(LAYERS[LAYERS.index(module) + 1 :])
    assert own - below == set()


@pytest.mark.parametrize("module", [layer for layer in LAYERS if layer != "_tf"])
def test_private_tensorflow_stays_behind_the_boundary(module: str) -> None:
    assert not {name for name in imports(PACKAGE / f"{module}.py") if name.startswith("tensorflow.")}
    assert "__internal__" not in (PACKAGE / f"{module}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("module", ["_errors", "_plan"])
def test_pure_modules_import_no_tensorflow(module: str) -> None:
    assert not {name for name in imports(PACKAGE / f"{module}.py") if name.split(".")[0] in ("tensorflow", "keras")}
