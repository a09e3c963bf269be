"""The sampler names the line that takes the time."""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time

import pytest

import flatout
from flatout.config.registry import is_user_code
from flatout.measure.attach import lines as sampling
from flatout.measure.attach.lines import (
    LineSampler,
    LineTotals,
    line_of,
    memory_file,
    pause_s,
    stacks_in,
    user_frame,
)
from flatout.training import loop
from flatout.training.metrics.phases import PhaseTimer


def test_user_code_is_what_nobody_installed(tmp_path):
    assert loop.__file__ == sampling.LOOP
    for file in (__file__, "<ipython-input-3-abc>"):
        assert is_user_code(file)
    written, installed = (tmp_path / "libraries" / name for name in ("mine.py", "theirs/part.py"))
    (tmp_path / "libraries" / "theirs-1.0.dist-info").mkdir(parents=True)
    record = tmp_path / "libraries" / "theirs-1.0.dist-info" / "RECORD"
    record.write_text("theirs/__init__.py,sha256=0,0\ntheirs/part.py,sha256=1,2\n")
    assert is_user_code(str(written))
    assert not is_user_code(str(installed)), "as by `pip install --target`"
    libraries = (flatout.__file__, loop.__file__, json.__file__, pytest.__file__)
    for file in (*libraries, "<frozen importlib._bootstrap>", "<string>"):
        assert not is_user_code(file)


def test_the_innermost_user_frame_counts():
    file, line = user_frame(sys._getframe())
    assert file == __file__
    assert line_of(file, line) == "file, line = user_frame(sys._getframe())"
    assert line_of("absent.py", 1) == ""
    assert user_frame(None) is None


def test_stacks_name_the_frames_of_every_thread(tmp_path):
    entered, leave = threading.Event(), threading.Event()
    code = compile("entered.set()\nleave.wait(10)", str(tmp_path / "quälend 好.py"), "exec")
    values = {"entered": entered, "leave": leave}
    other = threading.Thread(target=exec, args=(code, values))
    other.start()
    assert entered.wait(10)
    with memory_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        found = stacks_in(file)
    own = [(file, line_of(file, number)) for file, number in found[threading.get_ident()]]
    assert (__file__, "faulthandler.dump_traceback(file, all_threads=True)") in own
    assert (str(tmp_path / "quälend 好.py"), 2) in found[other.ident]
    leave.set()
    other.join()


def test_a_slow_line_is_named_with_its_phase():
    timer = PhaseTimer()
    with LineSampler(lambda: timer.current) as sampler, timer.phase("data_wait"):
        while not sampler.sites(2).get("data"):
            time.sleep(0.05)
    (site, *_) = sampler.sites(2)["data"]
    assert site.file == __file__
    assert site.text in {"time.sleep(0.05)", 'while not sampler.sites(2).get("data"):'}
    assert site.seconds_per_step > 0
    assert "compute" not in sampler.sites(2)


def test_what_follows_the_last_step_does_not_count():
    with LineSampler(lambda: "other") as sampler:
        while not sampler.sites(1).get("python"):
            time.sleep(0.05)
        sampler.end_step()
        before = sampler.sites(1)
        time.sleep(0.1)
        sampler.drop_step()
        time.sleep(0.1)
    assert sampler.sites(1) == before


def test_the_thread_that_prepares_data_counts_while_the_loop_waits(monkeypatch):
    monkeypatch.setattr(sampling, "is_user_code", lambda file: file == "loader.py")
    timer, seen = PhaseTimer(), threading.Event()
    code = compile("\nwhile not seen.wait(0.005): pass", "loader.py", "exec")
    loader = threading.Thread(target=exec, args=(code, {"seen": seen}))
    with LineSampler(lambda: timer.current) as sampler:
        loader.start()
        with timer.phase("data_wait"):
            while not sampler.sites(1).get("data"):
                time.sleep(0.01)
        seen.set()
        loader.join()
    assert [(site.file, site.line) for site in sampler.sites(1)["data"]] == [("loader.py", 2)]


def test_a_closure_of_an_optimizer_is_not_its_work(monkeypatch):
    monkeypatch.setattr(sampling, "is_user_code", lambda file: file in ("loop.py", "closure.py"))
    closure, step = (
        compile(source, file, "exec")
        for source, file in (
            ("\nwhile not seen(): pass", "closure.py"),
            ("\n\nexec(closure)", "/site-packages/torch/optim/optimizer.py"),
        )
    )
    with LineSampler(lambda: "other") as sampler:

        def seen():
            return sampler.sites(1).get("python")

        loop = compile("\n\n\nexec(step)", "loop.py", "exec")
        exec(loop, {"step": step, "closure": closure, "seen": seen})
    (site,) = sampler.sites(1)["python"]
    assert (site.file, site.line) == ("closure.py", 2)
    assert (site.caller.file, site.caller.line) == ("loop.py", 4)


def test_other_threads_that_do_not_wait_are_seen():
    leave = threading.Event()

    def work():
        while not leave.is_set():
            sum(range(1000))

    with LineSampler(lambda: "forward") as sampler:
        others = [threading.Thread(target=target) for target in (work, lambda: leave.wait())]
        for other in others:
            other.start()
        while not sampler.sites(1).get("thread"):
            time.sleep(0.01)
        leave.set()
        for other in others:
            other.join()
    texts = {site.text for site in sampler.sites(1)["thread"]}
    assert texts <= {"while not leave.is_set():", "sum(range(1000))"}


def test_lines_are_averaged_and_those_seen_by_chance_omitted():
    totals = LineTotals()
    for line, seconds in ((7, 0.5), (7, 0.5), (9, 3.0), (7, 1.0), (8, 0.1), (8, 0.1), (8, 0.1)):
        totals.add("data", ("a.py", line), seconds)
    first, second = totals.sites(2, at_least=3)["data"]
    assert (first.line, first.seconds_per_step) == (7, 1.0)
    assert second.line == 8
    assert [site.line for site in totals.sites(2)["data"]] == [9, 7, 8]


def test_samples_become_rarer_once_there_are_enough():
    assert [pause_s(0.01, elapsed_s) for elapsed_s in (0, 3, 30, 3600)] == [0.01, 0.01, 0.1, 0.25]
    assert pause_s(0.5, 3600) == 0.5
