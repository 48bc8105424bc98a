"""Runs the notebooks and stores their outputs in them:
``python scripts/notebooks.py [NOTEBOOK ...]``.

Each runs from its first cell to its last in a separate process, in an empty directory. A Jupyter
kernel would use sockets and take longer to start; notebooks therefore use plain Python, without
IPython's ``!`` and ``%``.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import hashlib
import io
import json
import linecache
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CODE = "code_sha256"
"""Key in a notebook's metadata: the digest of the code that made its outputs."""


def digest(notebook: dict[str, Any]) -> str:
    """Returns the SHA-256 of a notebook's code."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


class Recorder(io.TextIOBase):
    """Replaces the screen: records the cells' printed text,
    figures and last values in nbformat's format.
    """

    def __init__(self) -> None:
        self.count = 0
        self.outputs: list[dict[str, Any]] = []

    def next_cell(self) -> None:
        """Begins the outputs of the next cell."""
        self.count = self.count + 1
        self.outputs = []

    def write(self, text: str) -> int:
        """Records text; ``print`` calls it."""
        if not (self.outputs and self.outputs[-1]["output_type"] == "stream"):
            self.outputs.append({"name": "stdout", "output_type": "stream", "text": ""})
        self.outputs[-1]["text"] += text
        return len(text)

    def value(self, value: object) -> None:
        """Records the value of a cell's last expression."""
        if value is not None:
            data = {"text/plain": repr(value)}
            result = {
                "data": data,
                "execution_count": self.count,
                "metadata": {},
                "output_type": "execute_result",
            }
            self.outputs.append(result)

    def pictures(self) -> None:
        """Records all open figures and closes them."""
        import matplotlib.pyplot as plt

        for number in plt.get_fignums():
            file = io.BytesIO()
            plt.figure(number).savefig(
                file, format="png", dpi=75, bbox_inches="tight", metadata={"Software": None}
            )
            data = {
                "image/png": base64.b64encode(file.getvalue()).decode(),
                "text/plain": "<Figure>",
            }
            self.outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close("all")


def execute(notebook: dict[str, Any]) -> None:
    """Runs the code cells in this process, in order and as one program,
    and puts their outputs into the notebook.

    Raises:
      Exception: raised by a cell; the cells after it have not run.
    """
    import matplotlib.pyplot as plt

    screen = Recorder()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main  # Python looks up the notebook's classes here
    sys.displayhook = screen.value
    plt.switch_backend("Agg")
    plt.show = lambda: screen.pictures()  # type: ignore[assignment]
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        screen.next_cell()
        name = f"<cell {screen.count}>"
        source = "".join(cell["source"])
        # for tracebacks
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        tree = ast.parse(source, name)
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last: list[ast.stmt] = [tree.body.pop()]
        else:
            last = []
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
            exec(compile(tree, name, "exec"), main.__dict__)
            # calls the display hook
            exec(compile(ast.Interactive(last), name, "single"), main.__dict__)
            screen.pictures()
        for output in screen.outputs:
            if output["output_type"] == "stream":
                output["text"] = output["text"].splitlines(keepends=True)
        cell["execution_count"] = screen.count
        cell["outputs"] = screen.outputs
    notebook["metadata"][CODE] = digest(notebook)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the named notebooks, or all; returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=pathlib.Path, metavar="NOTEBOOK")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="directory for the results; default: where the notebooks are",
    )
    args = parser.parse_args(argv)
    paths = [path.resolve() for path in args.notebooks] or NOTEBOOKS
    if len(paths) > 1:  # one process each
        more = ["--out", str(args.out.resolve())] if args.out else []
        return max(
            subprocess.run([sys.executable, __file__, str(path), *more]).returncode
            for path in paths
        )
    (path,) = paths
    out = (args.out or path.parent).resolve() / path.name
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sys.path.insert(0, "")  # as in Jupyter: modules that a notebook writes can be imported
        tempfile.tempdir = folder  # where the notebooks make theirs
        try:
            execute(notebook)
        except Exception:
            print(f"{path.name}:\n{traceback.format_exc()}", file=sys.stderr)
            return 1
    out.write_text(
        json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8"
    )
    print(f"{path.name}: {os.path.getsize(out) // 1000} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
