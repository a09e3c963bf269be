"""The command line: exit codes, --json, help, suggested names, and quiet ranks other than 0."""

import dataclasses
import errno
import inspect
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shouting import Fakes, Shout

from flatout.cli import main as cli
from flatout.cli import parser, terminal
from flatout.config.registry import COMMANDS
from flatout.distributed import launch, spinning
from flatout.errors import ConfigError, OutOfMemory, RunFailed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch, capsys):
    for module in (cli, parser):
        monkeypatch.setattr(module, "COMMANDS", Fakes())
    monkeypatch.delenv("RANK", raising=False)

    def call(*words):
        with pytest.raises(SystemExit) as stopped:
            cli.main(words)
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return call


def test_the_result_goes_to_stdout_and_everything_else_to_stderr(run):
    code, out, err = run("shout", "hello", "world", "--times", "2")
    assert (code, out) == (0, "streamed\nHELLO WORLD HELLO WORLD\n")
    assert "taking a breath" in err


def test_json_is_the_only_line_on_stdout(run):
    code, out, err = run("shout", "hello", "--json")
    assert code == 0
    assert json.loads(out) == {"words": ["hello"], "loss": 0.5}
    assert out.count("\n") == 1
    assert "HELLO" in err
    assert "streamed" in err


def test_json_is_valid_ascii_also_when_a_number_is_nan(run):
    before = signal.getsignal(signal.SIGTERM)
    _, out, _ = run("shout", "größer 日本", "--loss", "nan", "--json")
    assert json.loads(out) == {"words": ["größer 日本"], "loss": None}
    assert out.isascii()
    assert "NaN" not in out
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("ConfigError", 2),
        ("DataError", 2),
        ("CheckpointError", 2),
        ("RunFailed", 1),
        ("Stopped", 75),
        ("interrupted", 143),
        ("interrupt", 130),
        ("terminate", 143),
        ("usr1", 138),
    ],
)
def test_exit_codes(run, word, code):
    got, out, err = run("shout", word)
    assert got == code
    assert out == "streamed\n"
    assert ("Next: " if code in (75, 130, 138, 143) else "Fix: ") in err, (
        "a stopped run needs no fix"
    )
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["--verbose"], ["-v"], []], ids=str)
def test_verbose_reaches_the_report_of_a_run(run, monkeypatch, words):
    made = []
    monkeypatch.setattr(terminal, "RunReport", lambda terminal, *, verbose: made.append(verbose))
    assert run("shout", "hello", *words)[0] == 0
    assert made == [bool(words)]


def test_notes_of_an_error_are_printed_before_it(run):
    _, _, err = run("shout", "RunFailed", "line 7 of a worker")
    assert err.endswith("line 7 of a worker\nIt went wrong.\nFix: Do it right.\n")


def test_secrets_are_not_printed(run):
    url = "HTTP://us er:PASS@host/a"
    assert "PASS" not in "".join(run("shout", "RunFailed", url)[1:])
    assert "PASS" not in "".join(run("shout", url, "--tims", "2")[1:])
    assert "PASS" not in "".join(run(url)[1:])


def test_with_json_an_error_is_json_too(run):
    code, out, err = run("shout", "RunFailed", "--json")
    answer = {"error": "It went wrong.", "fix": "Do it right.", "exit_code": 1}
    assert json.loads(out) == answer | {"kind": "RunFailed"}
    assert code == 1
    assert err.endswith("It went wrong.\nFix: Do it right.\n")


def test_bugs_show_their_traceback(monkeypatch):
    for module in (cli, parser):
        monkeypatch.setattr(module, "COMMANDS", Fakes())
    with pytest.raises(ZeroDivisionError):
        cli.main(["shout", "crash"])


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["shuot"], "There is no command named 'shuot'.", "Did you mean 'shout'?"),
        (
            ["shout", "hi", "--time", "3"],
            "`flatout shout` has no option '--time'.",
            "Did you mean '--times'?",
        ),
        (
            ["shout", "hi", "--jsn"],
            "`flatout shout` has no option '--jsn'.",
            "Did you mean '--json'?",
        ),
        (
            ["shout", "hi", "--xyzzy"],
            "`flatout shout` has no option '--xyzzy'.",
            "flatout shout hello --times 2",
        ),
        (["shout", "hi", "-x"], "`flatout shout` has no option '-x'.", "flatout shout --help"),
        (
            ["shout", "hi", "--times", "many"],
            "`flatout shout`: invalid value for",
            "Remove --times for the default, 1",
        ),
        (["shout", "hi", "--times"], "`flatout shout`: ", "Remove --times for the default, 1"),
        (["shout"], "`flatout shout`: missing argument", "flatout shout hello --times 2"),
        (["--vesion"], "There is no command named '--vesion'.", "Did you mean '--version'?"),
    ],
)
def test_misspelt_words_get_a_suggestion(run, words, what, fix):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 2
    assert err.startswith(what)
    assert err.split("\n")[1].startswith("Fix: ")
    assert fix in err


@pytest.mark.parametrize("word", ["--runs", "--run-dri"])
def test_suggestions_leave_out_aliases(word):
    """torchrun takes `--run` for one of its own options."""
    with pytest.raises(ConfigError) as refused:
        parser.parse("train", ["shakespeare-char", word, "x"])
    assert "--run-dir" in refused.value.fix
    assert "--run'" not in refused.value.fix


def test_help_of_the_program_lists_the_commands(run):
    for words in ([], ["--help"], ["-h"], ["help"]):
        code, out, err = run(*words)
        assert (code, err) == (0, "")
        assert "shout  Shout some words." in out


@pytest.mark.parametrize("words", [[], *([name] for name in cli.COMMANDS.names())], ids=str)
def test_every_help_fits_80_columns(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.execute([*words, "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_json_may_come_before_the_command(run):
    assert run("--json", "--help") == run("--help")
    assert run("--json", "--version") == run("--version")
    assert run("--version")[1].startswith("flatout 0.")
    assert run("--json", "shout", "hello") == run("shout", "hello", "--json")


def test_help_of_a_command_has_its_options_and_an_example(run):
    code, out, _ = run("shout", "--help")
    assert code == 0
    assert run("shout", "-h") == run("help", "shout") == (0, out, "")
    assert "Shout some words." in out
    assert "How often." in out
    assert "--json" in out
    assert "Example: flatout shout hello --times 2" in out
    assert "Raises" not in out
    assert "observers" not in out


@pytest.mark.parametrize("name", cli.COMMANDS.names())
def test_help_describes_only_the_command_line(name):
    parameters = inspect.signature(cli.COMMANDS.get(name).call).parameters.values()
    text = parser.help_text(cli.COMMANDS.get(name))
    assert not [
        parameter.name
        for parameter in parameters
        if "Annotated" not in str(parameter.annotation) and f"`{parameter.name}`" in text
    ]


def test_invalid_choices_list_the_valid_ones(capsys):
    with pytest.raises(SystemExit):
        cli.main(["prepare", "a.txt", "--out", "b", "--on-bad-row", "skp"])
    assert (
        "invalid value for '--on-bad-row': 'skp' is not one of 'raise', 'skip'."
        in capsys.readouterr().err
    )


def test_other_ranks_are_quiet(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run("shout", "hello", "--json") == (0, "", "")
    assert run("shout", "ConfigError", "--json") == (
        2,
        "",
        "[rank 1] It went wrong.\nFix: Do it right.\n",
    )
    assert run("shout", "Stopped") == (75, "", "")
    assert run("shout", "RunFailed") == (1, "", "[rank 1] It went wrong.\nFix: Do it right.\n")


class Several(Fakes):
    """A command that runs in two processes."""

    def get(self, name):
        return dataclasses.replace(super().get(name), processes=lambda: 2)


@pytest.mark.parametrize("raises", [False, True])
def test_an_error_of_several_ranks_is_one_object(run, monkeypatch, raises):
    """Rank 0 leaves its error to the launcher, which may know of an earlier one of another rank."""
    for module in (cli, parser):
        monkeypatch.setattr(module, "COMMANDS", Several())

    def launched(command, count, environment, cores):
        with monkeypatch.context() as rank_0:
            for name in (cli.ANSWER, "RANK"):
                rank_0.setenv(name, environment.get(name, "0"))
            assert cli.execute(["shout", "DataError", "--json"]) == 2
        if raises:
            raise RunFailed("Rank 1 failed.", fix="See its message.")
        return 2

    monkeypatch.setattr(launch, "launch", launched)
    code, out, err = run("shout", "DataError", "--json")
    assert json.loads(out)["error"] == ("Rank 1 failed." if raises else "It went wrong.")
    assert json.loads(out)["exit_code"] == code == (1 if raises else 2)
    assert "It went wrong." in err


def python(*words, **options):
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
        **options,
    )


@pytest.mark.slow
def test_commands_that_only_read_never_import_torch(fox_run):
    root, _ = fox_run
    data, run = str(root / "data"), str(root / "runs/fox")
    lines = [
        *(["list", kind] for kind in ("models", "speedups", "machines")),
        *([name, "--help"] for name in cli.COMMANDS.names()),
        *([name, data] for name in ("inspect", "verify")),
        *([name, run] for name in ("runs", "verify")),
        ["runs", str(root / "runs")],
    ]
    program = (
        "import sys\nfrom flatout.cli.main import main\nfor words in "
        f"{lines!r}:\n    try:\n        main(words)\n    except SystemExit as end:\n"
        "        print('at the end:', end.code, 'torch' in sys.modules)"
    )
    done = python("-c", program)
    ends = [line for line in done.stdout.splitlines() if line.startswith("at the end:")]
    assert ends == ["at the end: 0 False"] * len(lines), done.stderr


@pytest.mark.slow
def test_help_imports_almost_nothing():
    program = (
        "import sys\nfrom flatout.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit:\n "
        "print({'click', 'rich', 'numpy'} & set(sys.modules))"
    )
    assert python("-c", program).stdout.splitlines()[-1].endswith("set()")


class Idle(Fakes):
    """A registry in which every command does nothing."""

    def get(self, name):
        def call() -> Shout:
            """Do nothing."""
            return Shout(words=["done"])

        return dataclasses.replace(COMMANDS.get(name), call=call, processes=None)

    def names(self):
        return COMMANDS.names()


@pytest.mark.parametrize(
    ("name", "is_told"),
    [("demo", True), ("train", True), ("diagnose", False), ("generate", False), ("plan", False)],
)
def test_a_busy_machine_is_reported_only_where_times_are_measured(
    name, is_told, monkeypatch, capsys
):
    for module in (cli, parser):
        monkeypatch.setattr(module, "COMMANDS", Idle())
    say = "spin_less_beside_others"
    monkeypatch.setattr(spinning, say, lambda progress: progress.say("It is busy."))
    with pytest.raises(SystemExit) as stopped:
        cli.main([name])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (0, "DONE\n")
    assert ("It is busy." in err) is is_told


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "Out of memory."),
        (MemoryError("Unable to allocate 8 GiB"), "Out of memory: Unable to allocate 8 GiB."),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory."),
        (RuntimeError("can't start new thread"), "Out of memory: can't start new thread."),
        (
            RuntimeError("[fail] DefaultCPUAllocator: can't allocate memory: 4 bytes.\nStack"),
            "Out of memory: can't allocate memory: 4 bytes.",
        ),
        (RuntimeError("could not create a primitive"), "could not create a primitive."),
        (RuntimeError("could not execute a primitive"), "could not execute a primitive."),
        (ImportError("x.so: failed to map segment from shared object"), "failed to map segment"),
        (OutOfMemory("It needs 3 GiB.", fix="Set fewer rows."), "It needs 3 GiB."),
    ],
)
def test_memory_that_runs_out_is_answered_with_the_limit(error, said, run, monkeypatch):
    def fail(**_):
        raise error

    monkeypatch.setattr("shouting.Shout", fail)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    code, _, err = run("shout", "hello")
    assert (code, said in err, "Set fewer rows" in err or "set fewer rows" in err) == (
        1,
        True,
        True,
    )
    assert "ulimit" not in err
    limits = (2**30, 2**30)
    assert "1,024 MiB: `ulimit -v unlimited`" in run("shout", "hello")[2]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("could not create a primitive descriptor for a matmul"), ImportError("no x")],
)
def test_other_errors_of_these_types_show_their_traceback(error, run, monkeypatch):
    def fail(**_):
        raise error

    monkeypatch.setattr("shouting.Shout", fail)
    with pytest.raises(type(error)):
        cli.execute(["shout", "hello"])


@pytest.mark.parametrize("words", [["train", "demo"], ["prepare", "a.txt", "--out", "b"]])
def test_a_system_without_file_locks_is_rejected(words, monkeypatch, capsys):
    for module in ("fcntl", "resource"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("flatout needs Linux or macOS")
    assert "WSL" in err


@pytest.mark.parametrize("name", cli.COMMANDS.names())
def test_every_command_has_an_example_and_help(name):
    command = cli.COMMANDS.get(name)
    options = parser.build(name)
    assert command.example.startswith(f"flatout {name}")
    assert hasattr(command.call, "__wrapped__"), "`checked` checks its arguments"
    assert cli.COMMANDS.describe(name)
    assert all(getattr(parameter, "help", None) for parameter in options.params), (
        "every argument and option has a help text"
    )


@pytest.mark.parametrize("name", cli.COMMANDS.names())
def test_help_starts_with_the_common_case(name):
    command = cli.COMMANDS.get(name)
    _usage, example, *_rest = parser.help_of(name).split("\n\n")
    assert " ".join(example.split()) == f"Example: {command.example}"
    takes_script = "script" in inspect.signature(command.call).parameters
    assert takes_script == (" -- python train.py" in command.example)
