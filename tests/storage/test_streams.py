"""Standard streams that are closed, full or abandoned, and terminals without Unicode."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.storage.streams import shortened

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CLI = "from flatout.cli import main as cli\n"


def test_a_terminal_without_unicode_is_not_an_error():
    program = f"{CLI}cli.call = lambda *_: print('größer')\ncli.main(['x'])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert done.stdout == b"gr\\xf6\\xdfer\n"


def test_a_closed_pipe_is_not_an_error():
    code = "for i in range(20000): print(i)"
    program = f"{CLI}def talk(*_):\n    {code}\ncli.call = talk\ncli.main(['x'])"
    talker = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    talker.stdout.readline()
    talker.stdout.close()
    assert talker.wait(timeout=60) == 1
    assert talker.stderr.read() == ""
    talker.stderr.close()


SHOUTER = """
import sys, shouting
from flatout.cli import main as cli
from flatout.cli import parser
cli.COMMANDS = parser.COMMANDS = shouting.Fakes()
cli.main(sys.argv[1:])
"""


def redirected(redirection, *words):
    """Run the fake command in a shell with its streams redirected."""
    line = f'"$0" -c "$1" shout "${{@:2}}" {redirection}'
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.run(
        ["bash", "-c", line, sys.executable, SHOUTER, *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize(
    ("redirection", "out"),
    [
        ("2>&-", "HELLO"),
        ("2>/dev/full", "HELLO"),
        (">&-", ""),
        ("<&- >&- 2>&-", ""),
        ("2> >(exit) > >(exit)", ""),
    ],
)
def test_closed_and_full_streams_do_not_end_a_command(redirection, out):
    done = redirected(redirection, "hello", *(["--json"] if not out else []))
    assert done.returncode == 0
    assert done.stdout.removeprefix("streamed\n").strip() == out
    assert "Error" not in done.stderr


def test_an_unwritable_result_is_a_failure():
    done = redirected(">/dev/full", "hello", "--json")
    assert done.returncode == 1
    assert done.stderr.endswith(
        "The result could not be written to standard output: No space left on device.\n"
    )
    assert redirected(">/dev/full 2>&-", "RunFailed").returncode == 1


def test_streaming_to_a_full_disk_is_an_error_with_a_fix():
    done = redirected(">/dev/full", "hello")
    assert (done.returncode, done.stderr.splitlines()[-2:]) == (
        1,
        [
            "Standard output cannot be written: No space left on device.",
            "Fix: Redirect it to another file or disk.",
        ],
    )


def test_files_opened_later_never_become_standard_error():
    program = (
        f"import os\n{CLI}cli.call = lambda *_: print(os.open('/dev/null', "
        "os.O_RDONLY)) or 0\ncli.main(['x'])"
    )
    line = '"$0" -c "$1" <&- 2>&-'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert int(done.stdout) > 2


def test_a_crash_below_python_shows_its_location():
    program = (
        f"import os, signal\n{CLI}cli.execute = lambda words: "
        "os.kill(os.getpid(), signal.SIGBUS)\ncli.main([])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGBUS
    assert "Bus error" in done.stderr
    assert "cli/main.py" in done.stderr


def test_a_long_list_shows_its_first_names():
    assert shortened("abcdef") == "a, b, c, d, e, f"
    assert shortened(range(40)) == "0, 1, 2, 3, 4, and 35 more"
    assert shortened([f"{n} is wrong." for n in range(1003)], 2, "\n").splitlines() == [
        "0 is wrong.",
        "1 is wrong.",
        "and 1,001 more",
    ]
