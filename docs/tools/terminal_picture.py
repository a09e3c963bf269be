"""Draw a command's last screen: `python docs/tools/terminal_picture.py flatout demo book.txt`.

The command runs in a pseudo-terminal, in a temporary directory with a copy of the files it names,
and rich exports the final screen to docs/assets/terminal.svg. The default is `flatout demo`,
which takes three minutes. The machine should be idle, because the picture shows rates.
"""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import shutil
import struct
import sys
import tempfile
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "assets" / "terminal.svg"
COLUMNS, ROWS = 92, 60
FIRST, LAST = 8, 38
"""Lines at the top and at the bottom of the picture; those between them are left out."""
CONTROL = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)")


def output_of(words: list[str]) -> str:
    """Run a command in a pseudo-terminal and return its output.

    Raises: SystemExit when the command fails.
    """
    written = []

    def read(file: int) -> bytes:
        data = os.read(file, 65_536)
        written.append(data)
        return data

    process, terminal = pty.fork()
    if process == 0:
        ioctl(1, TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.execvp(words[0], words)
    try:
        while read(terminal):
            pass
    except OSError as error:
        if error.errno != errno.EIO:  # how Linux reports the end of a pseudo-terminal
            raise
    output = b"".join(written).decode()
    if status := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        raise SystemExit(f"{output}\n{' '.join(words)} ended with exit code {status}.")
    return output


def screen(output: str) -> list[str]:
    """Return the lines of the final screen, with their colours.

    Only the control sequences of rich's progress display are interpreted.
    """
    lines, row = [""], 0
    for part in CONTROL.split(output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif found := re.fullmatch(r"\x1b\[(\d*)A", part):
            row = max(0, row - int(found[1] or 1))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif (part.endswith("m") and part.startswith("\x1b[")) or not CONTROL.fullmatch(part):
            lines[row] += part
    return [line.rstrip() for line in lines]


def svg(lines: list[str], title: str) -> str:
    """Return the picture of a terminal that shows these lines."""
    if len(lines) > FIRST + LAST:
        lines = [*lines[:FIRST], "[...]", *lines[-LAST:]]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=True)
    drawn = console.export_svg(title=title, theme=MONOKAI, unique_id="terminal")
    drawn = re.sub(r"\s*@font-face \{.*?\n    \}", "", drawn, flags=re.DOTALL)  # no font is loaded
    return drawn.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def main() -> None:
    """Run the command given, or the demo, and write the picture."""
    words = sys.argv[1:] or ["flatout", "demo"]
    files = [Path(word).resolve() for word in words if Path(word).is_file()]
    words = [Path(word).name if Path(word).is_file() else word for word in words]
    program = [sys.executable, "-m", *words] if words[0] == "flatout" else words
    os.environ.pop("NO_COLOR", None)
    os.environ |= {"PYTHONPATH": str(PICTURE.parents[2]), "TERM": "xterm-256color"}
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            shutil.copy(file, folder)
        os.chdir(folder)
        lines = screen(output_of(program))
    while lines and not re.sub(r"\x1b\[[0-9;]*m", "", lines[-1]):
        lines.pop()
    PICTURE.write_text(svg(lines, f"$ {' '.join(words)}"), encoding="utf-8")


if __name__ == "__main__":
    main()
