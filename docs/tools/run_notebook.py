"""Run the notebook and store its outputs: `python docs/tools/run_notebook.py`, in three minutes.

Needs the packages nbclient, ipykernel and ipywidgets. The machine should be idle, because the
outputs show rates. Results and what is printed are kept, without the progress of the calls.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"


def main() -> None:
    """Run every cell in a temporary directory, and write the notebook."""
    os.environ["PYTHONPATH"] = str(NOTEBOOK.parents[2])
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=600, record_timing=False)
        client.execute(cwd=folder)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                one
                for one in cell.outputs
                if one.output_type == "execute_result" or one.get("name") == "stdout"
            ]
    notebook.metadata.pop("widgets", None)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
