"""Run a command once per file operation, each time with a different operation failing.

After each failure, run it once more without one. Usage: python refused_files.py FOLDER ERRNO START
STRIDE WORDS..., with refusing_disk.so preloaded. The command writes into FOLDER.
"""

import contextlib
import ctypes
import hashlib
import io
import json
import os
import shutil
import sys
import traceback
from pathlib import Path

import torch  # noqa: F401  # imported once, not in every child

from flatout.cli import main as cli
from flatout.hardware import roofline

disk = ctypes.CDLL(None)
disk.refused.restype = ctypes.c_char_p
NOBODY = 1 << 30


def ended(words, place, number, error):
    """Run a command in a child in which one file operation fails.

    Returns: its exit code, output and operations, and the one that failed.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        with os.fdopen(reading) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(pid, 0)
        assert answer, f"operation {number} ended the process: {status}"
        return json.loads(answer)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        disk.refuse(os.fsencode(place), number, error)
        try:
            code = cli.execute(words)
        except BaseException:
            code = "a traceback"
            traceback.print_exc()
        disk.relent()
    found = {
        "code": code,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "operations": disk.operations(),
        "refused": disk.refused().decode(),
    }
    os.write(writing, json.dumps(found).encode())
    os._exit(0)


def result_of(run, place):
    """Return the results that must not change: a run's weights and losses, a dataset's files."""
    result = json.loads(run["out"].splitlines()[-1])
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in place.glob("data/*")
    }
    return {
        key: result[key]
        for key in ("tokens", "weights_sha256", "train_loss", "val_loss")
        if key in result
    } | files


def problems(first, codes, error):
    """Yield what is wrong with how a command ended after a failed file operation."""
    if first["code"] not in (0, 1, 2) or "Traceback" in first["err"]:
        yield f"ended in {first['code']}: {first['err'][-2000:]}"
    elif first["code"] and "\nFix: " not in first["err"]:
        yield f"names no fix: {first['err']}"
    if error == 5 and any(
        word in first["err"].lower() for word in ("free space", "make room", "with room")
    ):
        yield f"asks for room on a broken disk: {first['err']}"
    if codes not in ([], [f"{first['code']}\n"]):
        yield f"ended in {first['code']}, and exit_code says {codes}"


def main():
    place, error, start, stride, *words = sys.argv[1:]
    place, error = Path(place), int(error)
    roofline.measure = lambda *_: (0.1, 512)  # the hardware is not probed here

    def fresh():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)

    fresh()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert cli.execute(words) == 0  # so that lazy imports happen here, not in every child
    fresh()
    whole = ended(words, place, NOBODY, error)
    wanted, failed, tried = (
        result_of(whole, place),
        0,
        range(int(start), whole["operations"], int(stride)),
    )
    for number in tried:
        fresh()
        first = ended(words, place, number, error)
        codes = [path.read_text() for path in place.rglob("exit_code")]
        then = ended(words, place, NOBODY, error)
        found = list(problems(first, codes, error))
        if then["code"] or result_of(then, place) != wanted:
            found.append(
                f"the same command afterwards ended in {then['code']}, "
                f"with another result: {then['err'][-2000:]}"
            )
        failed += bool(found)
        for problem in found:
            print(f"{number}, {first['refused']}: {problem}")
    print(f"{len(tried)} operations rejected, {failed} with a wrong end")


main()
