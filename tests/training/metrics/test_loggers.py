"""Guards: a logger receives the run, and its failure is reported once and stops nothing."""

import errno
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from flatout.assembly import preflight
from flatout.config.sections import LogConfig
from flatout.errors import ConfigError, MissingPackage
from flatout.training.metrics import loggers
from flatout.training.metrics.loggers import (
    Guard,
    Logger,
    RemoteRun,
    configured_observers,
    reason_of,
    require_loggers,
)
from flatout.training.run import run_training
from flatout.training.run_dir.runlog import RunLog


class Recorder(Logger):
    """Keeps its calls; fails in the method `fails_in`."""

    def __init__(self, fails_in=None, error=None):
        super().__init__()
        self.calls, self.fails_in = [], fails_in
        self.error = error or ValueError("no place left.\nDetails.")

    def _note(self, method, value):
        self.calls.append((method, value))
        if method == self.fails_in:
            raise self.error

    def on_start(self, run):
        self._note("on_start", run.step)

    def on_record(self, record):
        self._note("on_record", record["step"])

    def on_event(self, event):
        self._note("on_event", event["event"])

    def on_end(self, summary):
        self._note("on_end", summary["steps"])

    def close(self, outcome):
        self._note("close", outcome)


class Slow(Recorder):
    """The same, but it waits for `open` before it starts."""

    def __init__(self, *values):
        super().__init__(*values)
        self.open, self.thread = threading.Event(), None

    def on_start(self, run):
        self.open.wait(60)
        self.thread = threading.current_thread()
        super().on_start(run)


@pytest.fixture
def events():
    return []


def guard_of(logger, events):
    return Guard("mine", logger, lambda kind, **fields: events.append((kind, fields)))


def whole_run(guard, *, last_event="end"):
    run = SimpleNamespace(step=4)
    guard.on_start(run)
    run.step = 9
    guard.on_event({"event": "start"})
    guard.on_tick(5, 6)
    guard.on_record({"step": 5})
    guard.on_event({"event": last_event})
    if last_event == "end":
        guard.on_end({"steps": 6})
    guard.close()


def test_a_logger_receives_the_whole_run(events):
    logger = Recorder()
    whole_run(guard_of(logger, events))
    assert logger.calls == [
        ("on_start", 4),
        ("on_event", "start"),
        ("on_record", 5),
        ("on_event", "end"),
        ("on_end", 6),
        ("close", "finished"),
    ]
    assert events == []


def test_a_logger_is_called_in_a_thread_and_nothing_waits_for_it(events):
    logger = Slow()
    guard = guard_of(logger, events)
    run = SimpleNamespace(step=4)
    guard.on_start(run)
    guard.on_record({"step": 5})  # returns although on_start still waits
    run.step = 9
    assert logger.calls == []
    logger.open.set()
    guard.close()
    assert logger.calls == [("on_start", 4), ("on_record", 5), ("close", "failed")]
    assert logger.thread is not threading.current_thread()
    assert not logger.thread.is_alive()


@pytest.mark.parametrize("method", ["on_start", "on_record", "on_end", "close"])
def test_after_a_failure_a_logger_is_left_alone(method, events):
    logger = Recorder(method)
    whole_run(guard_of(logger, events))
    assert logger.calls[-1][0] == method
    assert events == [("no_mine", {"logger": "mine", "reason": "no place left"})]


def test_the_failure_of_a_logger_is_reported_at_the_next_step(events):
    logger = Slow("on_start")
    guard = guard_of(logger, events)
    guard.on_start(SimpleNamespace(step=0))
    assert events == []
    logger.open.set()
    guard._thread.join(60)
    guard.on_tick(1, 2)
    assert [kind for kind, _ in events] == ["no_mine"]


def test_the_end_of_a_run_does_not_wait_forever(events, monkeypatch):
    monkeypatch.setattr(loggers, "WAIT_S", dict.fromkeys(loggers.WAIT_S, 0.0))
    logger = Slow()
    guard = guard_of(logger, events)
    guard.on_start(SimpleNamespace(step=0))
    guard.close()
    assert events == [("no_mine", {"logger": "mine", "reason": "it did not finish within 0 s"})]
    logger.open.set()


def test_who_quits_a_run_does_not_wait_for_a_logger(events, monkeypatch):
    logger = Slow()
    guard = guard_of(logger, events)
    guard.on_start(SimpleNamespace(step=0))
    monkeypatch.setattr(guard._thread, "join", lambda _: pytest.fail("it was waited for"))
    guard.close(wait=False)
    monkeypatch.undo()
    logger.open.set()
    guard._thread.join(60)
    assert logger.calls[-1] == ("close", "failed")


def test_a_stopped_run_is_not_a_failed_one(events):
    logger = Recorder()
    whole_run(guard_of(logger, events), last_event="stop")
    assert logger.calls[-1] == ("close", "stopped")


def test_news_is_reported_and_does_not_come_back(events):
    logger = Recorder()
    guard = guard_of(logger, events)
    guard.on_start(SimpleNamespace(step=0))
    logger.say("shown at https://example.org")
    guard.on_tick(1, 2)
    assert events == [("logger", {"logger": "mine", "text": "shown at https://example.org"})]
    guard.on_event({"event": "logger", "logger": "mine"})
    guard.on_event({"event": "logger", "logger": "other"})
    guard.close()
    assert [value for method, value in logger.calls if method == "on_event"] == ["logger"]


def test_a_logger_of_the_user_fails_under_one_name(events):
    guard = Guard("mine:Mine", Recorder("on_start"), lambda kind, **_: events.append(kind))
    guard.on_start(SimpleNamespace(step=0))
    guard.close()
    assert events == ["no_logger"]


def test_reasons_continue_a_sentence():
    assert reason_of(OSError(errno.EIO, os.strerror(errno.EIO))) == os.strerror(errno.EIO)
    assert reason_of(ValueError("Refused.\nMore.")) == "Refused"
    assert reason_of(KeyError()) == "KeyError"
    secret = ValueError("no answer from https://me:secret@host.example/api\x1b[2J")
    assert reason_of(secret) == "no answer from https://host.example/api\\x1b[2J"


OWN = """\
import flatout
from flatout.training.metrics.loggers import Logger
from flatout.training.run_dir.runlog import RunLog



class Watcher(flatout.Quiet):
    pass


def make():
    return Watcher()


def make_nothing():
    return None


class Collector(flatout.Quiet):
    def on_record(self, record):
        STEPS.append(record["step"])


class Broken(flatout.Quiet):
    def on_record(self, record):
        1 / 0


class BrokenLogger(Logger):
    def on_record(self, record):
        1 / 0


STEPS = []
READY = Watcher()
NUMBER = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write a module of the user, `own_loggers`."""
    (tmp_path / "own_loggers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_loggers", None)


@pytest.mark.usefixtures("own")
def test_observers_of_the_user_are_classes_functions_or_objects():
    names = ("own_loggers:Watcher", "own_loggers:make", "own_loggers:READY")
    config = LogConfig(observers=",".join(names))
    require_loggers(config)
    found = configured_observers(config)
    assert [type(one).__name__ for one in found] == ["Watcher"] * 3
    assert found[2] is sys.modules["own_loggers"].READY


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_a_run_calls_the_observers_that_its_config_names(tiny_config, tmp_path):
    config = tiny_config(train__steps=2, log__observers="own_loggers:Collector")
    run_training(config, tmp_path / "run")
    assert sys.modules["own_loggers"].STEPS == [1, 2, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_a_mistake_of_an_observer_ends_the_run_and_one_of_a_logger_does_not(tiny_config, tmp_path):
    with pytest.raises(ZeroDivisionError):
        run_training(tiny_config(log__observers="own_loggers:Broken"), tmp_path / "first")
    config = tiny_config(train__steps=2, log__to="own_loggers:BrokenLogger,tensorboard")
    assert run_training(config, tmp_path / "second")["steps"] == 2
    (event,) = [one for one in RunLog(tmp_path / "second").events if one["event"] == "no_logger"]
    assert event["reason"] == "division by zero"
    assert any((tmp_path / "second" / "tensorboard").iterdir())


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"observers": "own_loggers:NUMBER"}, "is not an observer: it has no 'on_start'"),
        ({"observers": "own_loggers:Wather"}, "has no 'Wather'"),
        ({"to": "own_loggers:Watcher"}, "is not a logger: it has no 'close'"),
        ({"to": "wandbb"}, "no logger named 'wandbb'"),
    ],
)
def test_other_objects_are_rejected(config, message):
    with pytest.raises(ConfigError, match=message):
        require_loggers(LogConfig(**config))


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_a_function_that_returns_no_observer_leaves_no_run_directory(tiny_config, tmp_path):
    with pytest.raises(ConfigError, match="is not an observer"):
        run_training(tiny_config(log__observers="own_loggers:make_nothing"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_answered_with_its_install_line(name, monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda _: None)
    with pytest.raises(MissingPackage, match=rf'pip install "flatout\[{name}\]"'):
        require_loggers(LogConfig(to=name))


def test_the_id_of_a_remote_run_is_kept_in_the_run_directory(tmp_path):
    remote = RemoteRun(tmp_path, "wandb")
    assert remote.read() == {}
    remote.write(id="abc", entity=None)
    assert RemoteRun(tmp_path, "wandb").read()["id"] == "abc"
