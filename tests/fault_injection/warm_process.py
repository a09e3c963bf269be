"""Forks a child for each command of flatout, so that a killed command costs no import.

Standard input has one JSON request per line. {"here": words} runs a command in this process, which
loads what it imports late, and is answered with null or its error. {"start": words, "output": path,
"environment": {}, "stopped": false} starts a command and is answered with its pid. {"wait": pid,
"seconds": limit} is answered with its exit code, negative for a signal, or null while it runs.
"""

import contextlib
import ctypes
import io
import json
import os
import signal
import sys
import time
import traceback

import psutil

from flatout.cli import main as cli
from flatout.hardware import roofline

PR_SET_PTRACER, ANY_PROCESS = 0x59616D61, -1


def start(words, output, environment, stopped):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for name, descriptor in (("out", 1), ("err", 2)):
            file = os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, descriptor)
            os.close(file)
        os.environ.update(environment)
        if stopped:  # until a tracer is attached; Yama lets only an ancestor trace by default
            ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY_PROCESS, 0, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
        code = cli.execute(words)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait(pid, seconds):
    give_up = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > give_up:
            return None
        time.sleep(0.002)


def main():
    roofline.measure = lambda *_: (0.1, 512)  # the hardware is not probed here
    psutil.cpu_percent = lambda **_: 0.0
    for line in sys.stdin:
        request = json.loads(line)
        if "here" in request:
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = cli.execute(request["here"])
            answer = None if code == 0 else said.getvalue()
        elif "start" in request:
            answer = start(
                request["start"], request["output"], request["environment"], request["stopped"]
            )
        else:
            answer = wait(request["wait"], request["seconds"])
        print(json.dumps(answer), flush=True)


main()
