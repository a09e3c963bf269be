"""Collects what a bare machine lacks: packages, nanoGPT's model and the commit."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "typing_extensions",
    "gigatoken",
    "torchao",
    "liger_kernel",
    "click",
    "tenacity",
)
"""Packages that a machine with torch, Triton and the usual ML packages may lack.

The packed copy shadows an installed one.
"""
NEEDLESS = ("torchao/*.so", "torchao/testing/**", "torchao/prototype/mx_formats/**/*.so")
"""Parts of the wheels that are not packed.

torchao's kernels are built for another torch, and fp8 training uses none of them.
"""
PYTHON = "3.12"
PLATFORMS = tuple(
    f"manylinux{glibc}_x86_64"
    for glibc in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "_2_12", "2010", "_2_5", "1")
)
MANIFEST = "manifest.json"


def pack(
    folder: Path,
    *,
    nanogpt: Path | None,
    commit: str | None,
    code: str,
    minutes: float,
    max_mib: float | None = None,
) -> list[str]:
    """Fill a folder with what a bare machine lacks; return its contents and the call commands.

    `code` is the digest of the code, `minutes` the time limit of a call, and `max_mib` that of the
    repository and the folder together.

    Raises: SystemExit when nanoGPT is missing, a package cannot be downloaded, or the result is too
            large.
    """
    if nanogpt is not None:
        check_nanogpt(nanogpt)
    site = folder / "site"
    pins = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as scratch:
        download([f"{name}=={pins[normalised(name)]}" for name in PACKAGES], Path(scratch))
        shutil.rmtree(site, ignore_errors=True)
        site.mkdir(parents=True)
        wheels = {wheel.name: unpack(wheel, site) for wheel in sorted(Path(scratch).glob("*.whl"))}
    for pattern in NEEDLESS:
        for path in site.glob(pattern):
            if path.is_file():
                path.unlink()
    lines = [f"{folder / 'site'}: {', '.join(wheels)}"]
    if nanogpt is not None:
        (folder / "nanoGPT").mkdir(exist_ok=True)
        shutil.copyfile(nanogpt / "model.py", folder / "nanoGPT" / "model.py")
        lines.append(f"{folder / 'nanoGPT'}: model.py from {nanogpt}")
    else:
        lines.append(
            "nanoGPT is skipped: give its folder with --nanogpt, or the calls have no baseline to"
            " compare with."
        )
    commit = commit or git("describe", "--always", "--dirty=+", "--exclude=*") or ""
    files = digests(folder)
    manifest = {"commit": commit, "code": code, "python": PYTHON, "wheels": wheels, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    packed, tree = size_of(folder), tree_bytes(folder)
    lines.append(
        f"{packed / 2**20:.1f} MiB packed, {tree / 2**20:.1f} MiB in the repository; commit"
        f" {commit or 'unknown: give --commit'}."
    )
    if max_mib is not None and packed + tree > max_mib * 2**20:
        raise SystemExit(
            f"{(packed + tree) / 2**20:.0f} MiB exceed the limit of {max_mib:g} MiB (--max-mib)."
            " Fix: remove untracked files from the repository."
        )
    return [*lines, "", *instructions(folder, minutes)]


def instructions(folder: Path, minutes: float) -> Iterator[str]:
    """Yield the instructions for making the calls."""
    yield (
        f"Copy the repository and {folder} to the machine, set $OUT to an empty folder for the"
        " results, and run in the root of the repository, one call at a time:"
    )
    for number in ("1", "2", "3", "4"):
        yield f"  {command(folder, number, minutes)}"
    yield (
        f"After each call, copy the files of $OUT to {folder / 'results'}, where the next call"
        " reads them. --call next runs the first unfinished call."
    )


def command(folder: Path, number: str, minutes: float) -> str:
    """Return the command line of one call."""
    paths = f'PYTHONPATH="$PWD/{folder}/site:$PWD"'
    return (
        f"{paths} python3 benchmarks/first_contact.py --call {number} --kit {folder} --seed"
        f' {folder}/results --results "$OUT" --minutes {minutes:g}'
    )


def check_nanogpt(folder: Path) -> None:
    """Check that a folder contains nanoGPT's model.

    Raises: SystemExit.
    """
    if not (folder / "model.py").is_file():
        raise SystemExit(
            f"{folder} has no model.py. Fix: git clone https://github.com/karpathy/nanoGPT, and"
            " give that folder with --nanogpt."
        )


def commit_of(folder: Path | None, *, code: str) -> str | None:
    """Return the packed commit, with + if the code changed since; None if nothing was packed."""
    path = None if folder is None else folder / MANIFEST
    if path is None or not path.exists():
        return None
    held = json.loads(path.read_text(encoding="utf-8"))
    return (
        held["commit"].removesuffix("+")
        + ("+" if held["code"] != code or held["commit"].endswith("+") else "")
        if held["commit"]
        else None
    )


def pinned(constraints: str) -> dict[str, str]:
    """Return the pinned version of each package in a constraints file, by normalised name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", constraints, re.MULTILINE)
    return {normalised(name): version for name, version in found}


def normalised(name: str) -> str:
    """Return a package name in normalised form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def download(wanted: list[str], folder: Path) -> None:
    """Download the wheels for the target machine's Python with pip.

    Raises: SystemExit with pip's output.
    """
    words = [
        "--disable-pip-version-check",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        "--implementation",
        "cp",
    ]
    words += [
        word for abi in ("cp" + PYTHON.replace(".", ""), "abi3", "none") for word in ("--abi", abi)
    ]
    words += [word for platform in PLATFORMS for word in ("--platform", platform)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *words, "-d", str(folder), *wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"pip could not download {', '.join(wanted)}: {done.stderr.strip()[-600:]}"
        )


def unpack(wheel: Path, site: Path) -> str:
    """Unpack a wheel and return its SHA-256."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def digests(folder: Path) -> dict[str, Any]:
    """Return the number of files and bytes, and the digest of nanoGPT's model if present."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    model = folder / "nanoGPT" / "model.py"
    found: dict[str, Any] = {
        "count": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }
    return found | (
        {"nanogpt_sha256": hashlib.sha256(model.read_bytes()).hexdigest()} if model.exists() else {}
    )


def size_of(folder: Path) -> int:
    """Return the total size of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tree_bytes(folder: Path) -> int:
    """Return the size of the repository's tracked and untracked files without the packed folder."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    paths = (
        [ROOT / name for name in listed.split("\0") if name] if listed else list(ROOT.rglob("*"))
    )
    inside = folder.resolve()
    return sum(
        path.stat().st_size
        for path in paths
        if path.is_file() and inside not in path.resolve().parents
    )


def git(*words: str) -> str | None:
    """Return git's output, or None without git or a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/first_contact.py; run: python benchmarks/first_contact.py"
        " --help"
    )
