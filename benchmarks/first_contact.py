"""Measures the GPU targets: tests, every target, profiles, and the ladder if there is time.

    # measure everything; run it again to continue
    python benchmarks/first_contact.py --results results --nanogpt path/to/nanoGPT
    # print the calls and their expected duration
    python benchmarks/first_contact.py --plan
    # check on a CPU, at toy shapes, that everything runs
    python benchmarks/first_contact.py --tiny --results FOLDER

For a machine that is offline, or that limits the length of a command or the size of an upload:

    # collect what the machine lacks, and print the command of each call
    python benchmarks/first_contact.py --pack .kit --nanogpt path/to/nanoGPT --minutes 9 \\
        --max-mib 64

The work is divided into calls. A call ends within --minutes and starts no step that would not
finish in time; it estimates each step from the steps before it. Results are written after each
step, so a call can be killed at any time. The same call or another one continues from there, also
on another machine if the results folder is copied along. Figures measured with other flatout code
are kept with their commit; only failed steps are retried. A call that has finished its own steps
continues with those of the others.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import psutil
    import throughput
    from contact_call import Contact
    from contact_pack import MANIFEST, check_nanogpt, commit_of, instructions, pack
    from contact_plan import CALLS, plan_lines
    from contact_results import Results

    from flatout.files import PART
    from flatout.hardware import probe
except ModuleNotFoundError as error:
    raise SystemExit(
        f"The package {error.name} is missing. Fix: install flatout, or copy the folder that --pack"
        " fills and set PYTHONPATH as in docs/gpu.md."
    ) from None

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".kit-cache"
"""Compiled kernels, reused by the next call if the machine is still there."""
MINUTES = 60.0


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    # the call started with the process: importing torch counts
    began_s = time.monotonic() - (time.time() - psutil.Process().create_time())
    arguments = parser().parse_args(words)
    if arguments.plan:
        print(
            "\n".join(
                [
                    *plan_lines(lambda entry: entry.rows, throughput.is_selected),
                    "",
                    *instructions(arguments.kit or Path(".kit"), arguments.minutes),
                ]
            )
        )
    elif arguments.pack:
        print(
            "\n".join(
                pack(
                    arguments.pack,
                    nanogpt=arguments.nanogpt,
                    commit=arguments.commit,
                    code=throughput.code_digest(ours=True),
                    minutes=arguments.minutes,
                    max_mib=arguments.max_mib,
                )
            )
        )
    elif arguments.results is None:
        raise SystemExit("Give --results DIR, --plan, or --pack DIR.")
    else:
        run_call(arguments, began_s)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--plan", action="store_true", help="print the calls and what they do")
    made.add_argument(
        "--pack", type=Path, metavar="DIR", help="collect in DIR what a bare machine lacks"
    )
    made.add_argument(
        "--call",
        choices=[*map(str, CALLS), "next"],
        default="next",
        help="the call to start with; next (default) is the first with steps left",
    )
    made.add_argument(
        "--results",
        type=Path,
        help="folder of the results, read and written; at most seven small files",
    )
    made.add_argument(
        "--seed",
        type=Path,
        metavar="DIR",
        help="earlier results, copied to --results where it has none",
    )
    made.add_argument(
        "--kit",
        type=Path,
        help="the folder that --pack filled, for its nanoGPT and its commit",
    )
    made.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="time limit, for machines that limit the length of a command (60)",
    )
    made.add_argument(
        "--max-mib",
        type=float,
        help="with --pack: refuse a larger upload, the repository and the folder together",
    )
    made.add_argument("--nanogpt", type=Path, help="a folder with nanoGPT's model.py")
    made.add_argument("--commit", help="commit to record if there is no repository")
    made.add_argument(
        "--only",
        default="*",
        help="limit the measurements, as --only of throughput.py",
    )
    made.add_argument("--tiny", action="store_true", help="toy shapes on the CPU")
    return made


def run_call(arguments: argparse.Namespace, began_s: float) -> None:
    """Run one call and print its table."""
    if not arguments.tiny and not probe().gpus:
        raise SystemExit(
            "This benchmark needs a GPU, and none was found. --tiny runs every step at toy shapes"
            " on the CPU."
        )
    check(arguments)
    with suppress(OSError):  # torch and Triton have caches of their own
        CACHE.mkdir(exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor"))
        os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE / "triton"))
    with (
        locked(arguments.results),
        tempfile.TemporaryDirectory(prefix="flatout-contact-") as scratch,
    ):
        if arguments.seed and arguments.seed.is_dir():
            copy_missing(arguments.seed, arguments.results)
        contact = Contact(
            session(arguments, Path(scratch)), Results(arguments.results), arguments, began_s
        )
        number = contact.next_call() if arguments.call == "next" else int(arguments.call)
        contact.run(number)
        print("\n".join(contact.table(number)))


def check(arguments: argparse.Namespace) -> None:
    """Check the arguments of a call before it spends any time.

    Raises: SystemExit.
    """
    if arguments.kit and not (arguments.kit / MANIFEST).is_file():
        raise SystemExit(
            f"--pack did not fill {arguments.kit}: it has no {MANIFEST}. Fix: copy the packed"
            " folder, or omit --kit."
        )
    if arguments.nanogpt:
        check_nanogpt(arguments.nanogpt)
    if not any(throughput.is_selected(entry, arguments.only) for entry in throughput.ENTRIES):
        raise SystemExit(
            f"--only {arguments.only} matches nothing. Fix: python benchmarks/throughput.py --list"
            " names the workloads and their entries."
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the results folder for this call; the lock ends with the process.

    Raises: SystemExit when another call holds the lock, or the folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        raise SystemExit(
            f"{folder} cannot be written: {why}. Fix: give another folder with --results."
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):  # other errors: a file system without locks
            os.close(handle)
            raise SystemExit(
                f"Another call is writing to {folder}. Fix: wait until it finishes, or give another"
                " folder with --results."
            ) from None
    try:
        yield
    finally:
        os.close(handle)


def copy_missing(seed: Path, folder: Path) -> None:
    """Copy the earlier results that `folder` lacks, each file atomically.

    An interrupted copy is repeated.
    """
    for path in sorted(seed.iterdir()):
        if path.is_file() and not path.name.endswith(PART) and not (folder / path.name).exists():
            copy = folder / f"{path.name}{PART}"
            shutil.copyfile(path, copy)
            copy.replace(folder / path.name)


def session(arguments: argparse.Namespace, scratch: Path) -> throughput.Session:
    """Return the throughput.py session, with the packed nanoGPT and commit."""
    packed = arguments.kit / "nanoGPT" if arguments.kit else None
    nanogpt = arguments.nanogpt or (packed if packed and packed.is_dir() else None)
    commit = arguments.commit or commit_of(arguments.kit, code=throughput.code_digest(ours=True))
    words = ["--out", str(arguments.results), *(["--tiny"] if arguments.tiny else [])]
    words += [
        *(["--nanogpt", str(nanogpt)] if nanogpt else []),
        *(["--commit", commit] if commit else []),
    ]
    return throughput.Session(
        throughput.parser().parse_args(words), probe(), arguments.results, scratch
    )


if __name__ == "__main__":
    main()
