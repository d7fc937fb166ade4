"""Every Python block of the README runs, in order, in one process."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_python_blocks_run(tmp_path: pathlib.Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    root = str(README.parent)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": root}
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.splitlines() if re.fullmatch(r"\d+\.\d+", line)]
    assert len(losses) == 4


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 175
