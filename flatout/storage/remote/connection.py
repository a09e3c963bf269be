"""Opens the fsspec filesystem of a URL, retries transient errors and explains permanent ones."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import TYPE_CHECKING, Literal, TypeVar

from flatout.errors import DataError, FlatoutError, MissingPackage
from flatout.storage.files import Unfinished, not_written
from flatout.storage.remote.urls import is_local, is_web, protocol_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from fsspec.callbacks import Callback

T = TypeVar("T")
Access = Literal["read", "write"]

ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
"""Pause before the second attempt. It doubles each time."""
CONNECT_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 60.0
"""A request is retried when a web server sends nothing for this long."""

_PACKAGES = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "hf": ("huggingface_hub", "hub"),
}
"""Package and extra that a protocol needs besides the core packages."""
_CREDENTIALS = {
    "s3": "Give AWS credentials, for example with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "or with a profile.",
    "gs": "Log in with `gcloud auth application-default login`.",
    "hf": "Log in with `hf auth login`, and accept the terms on the repository's page "
    "if it has any.",
}
_INTERPRETING = {"reference"}
"""Filesystems that execute instructions in a file: fsspec before 2026 renders the templates of
`reference://` with full Jinja, which can run code.
"""
_BUGS = (ArithmeticError, AssertionError, AttributeError, NameError, TypeError)
"""Errors in the code, not in the network: a retry would hide them."""
_CHECK_NETWORK = "Check the network and the server, then run the same command again."
_PRESENT_PARTICIPLE = {"read": "Reading", "write": "Writing"}


class Unreachable(DataError):
    """A server failed on every attempt, or a disk is full. It may answer later."""


class NothingThere(DataError):
    """A server answered that a URL does not exist."""


class _CallbackFailed(Exception):
    """Carries the error of a callback past what retries the errors of a network."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def byte_counter(advance: Callable[[int], None]) -> Callback:
    """Return an fsspec callback that calls `advance` with new bytes, negative after a restart.

    `with_retries` raises an error of `advance` as it is, whatever its type.
    """
    from fsspec.callbacks import Callback

    counted = 0

    def count(size: int | None, value: int, **_: object) -> None:
        nonlocal counted
        try:
            advance(value - counted)
        except Exception as error:
            raise _CallbackFailed(error) from error
        counted = value

    return Callback(hooks={"count": count})


def open_filesystem(url: str, access: Access = "read") -> tuple[AbstractFileSystem, str]:
    """Return the filesystem of a URL and the path inside it.

    Raises: MissingPackage; DataError for a URL that no filesystem serves; Unreachable when opening
            it needs an answer from the server and none comes.
    """
    import fsspec

    protocol = protocol_of(url)
    if "::" in url or protocol in _INTERPRETING:
        raise DataError(
            f"{url} would be read through a different filesystem, "
            "which may execute instructions in the files that it reads.",
            fix="Name the URL itself, in a single store, without `::`.",
        )
    try:
        filesystem, path = fsspec.core.url_to_fs(
            f"{protocol}://{url.partition('://')[2]}", **_connection_options(url)
        )
    except ImportError as error:
        package, extra = _PACKAGES.get(protocol, (str(error.name or protocol), ""))
        line = f'pip install "flatout[{extra}]"' if extra else f"pip install {package}"
        cause = error.__cause__ or error  # the package may be there, and lack another one
        raise MissingPackage(
            f"{_PRESENT_PARTICIPLE[access]} {url} needs the package {package}: {cause}.",
            fix=f"Install it: `{line}`.",
        ) from error
    except ValueError as error:
        raise DataError(
            f"{url}: {str(error).rstrip('.')}.",
            fix="Supported protocols include file, gs, hf, http, https and s3.",
        ) from error
    except OSError as error:
        raise Unreachable(
            f"Cannot {access} {url}: {_message_of(error)}.", fix=_CHECK_NETWORK
        ) from error
    return filesystem, str(path)


def _connection_options(url: str) -> dict[str, object]:
    if not is_web(url):
        return {}
    import aiohttp

    timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=STALL_TIMEOUT_S)
    return {"client_kwargs": {"trust_env": True, "timeout": timeout}}  # honours proxy variables


def with_retries(
    url: str,
    action: Callable[[], T],
    *,
    access: Access = "read",
    where: str = "",
) -> T:
    """Return the result of `action`, retrying transient errors with growing pauses.

    Raises: Unreachable when every attempt failed; NothingThere, or another DataError, when a retry
            cannot help; at once, what a callback raised (`byte_counter`).
    """
    tried = 0
    while True:
        try:
            return action()
        except _CallbackFailed as failed:
            raise failed.error from failed.error.__cause__
        except (FlatoutError, *_BUGS):
            raise
        except Exception as error:  # every filesystem has its own family of errors
            permanent = _permanent_error(url, error, access)
            if permanent is not None:
                raise permanent from error
            tried += 1
            if tried == ATTEMPTS:
                cause = _root_cause(url, error)
                message = _message_of(cause) or type(cause).__name__
                raise Unreachable(
                    f"Cannot {access} {url}{where}: {message} ({ATTEMPTS} attempts).",
                    fix=_CHECK_NETWORK,
                ) from cause
        sleep(FIRST_PAUSE_S * 2 ** (tried - 1))


def _root_cause(url: str, error: BaseException) -> BaseException:
    """Return the underlying error: for HTTP, fsspec reports any failure as a missing file."""
    cause = error.__cause__
    is_wrapped = is_web(url) and isinstance(error, FileNotFoundError)
    return cause if is_wrapped and cause is not None else error


def _message_of(error: BaseException) -> str:
    """Return an error's message in one line. For an HTTP error, its status and reason."""
    if hasattr(error, "status") and hasattr(error, "message"):
        return f"{error.status} {error.message}".strip()
    return next((line for line in str(error).splitlines() if line.strip()), "").strip().rstrip(".")


def _permanent_error(url: str, error: BaseException, access: Access) -> DataError | None:
    """Return the error to raise when a retry cannot help, or None."""
    error = _root_cause(url, error)
    status = getattr(error, "status", None) or getattr(
        getattr(error, "response", None), "status_code", None
    )
    message = _message_of(error)
    doing = _PRESENT_PARTICIPLE[access]
    if is_local(url) and access == "write" and isinstance(error, OSError):
        failed = not_written(url, error)
        kind = Unreachable if isinstance(failed, Unfinished) else DataError
        return kind(failed.what, fix=failed.fix)
    if (
        isinstance(error, PermissionError)
        or status in (401, 403)
        or type(error).__name__ == "NoCredentialsError"
    ):
        fix = _CREDENTIALS.get(protocol_of(url), "Check the URL and your permissions there.")
        if access == "write":
            fix += " The account must be allowed to write."
        return DataError(f"{doing} {url} is not allowed: {message or 'forbidden'}.", fix=fix)
    if isinstance(error, FileNotFoundError | NotADirectoryError) or status in (404, 410):
        reason = f" ({message})" if message and message not in url else ""
        fix = "Check the URL, and whether you may write there."
        return NothingThere(
            f"There is nothing at {url}{reason}.",
            fix=fix if access == "write" else "Check the URL.",
        )
    if isinstance(error, NotImplementedError):
        return DataError(
            f"{doing} {url} is not possible: {protocol_of(url)} does not support it.",
            fix="Use a URL with a different protocol.",
        )
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429):
        return DataError(f"The server rejects {url}: {message}.", fix="Check the URL.")
    return None
