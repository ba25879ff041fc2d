"""Addresses: files of object stores and other file systems, through fsspec: `s3://`, `gs://`, `hf://`, `memory://`.

What may pass is tried again; what would only fail again is an error that says what to do. Options of a file system,
such as the endpoint of an S3 server, come from its own environment variables or fsspec's (`FSSPEC_S3_ENDPOINT_URL`).
"""

import errno
import io
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from braidlm.core.errors import BraidError
from braidlm.core.reading import MAX_BYTES, parse_json

Result = TypeVar("Result")
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""The packages of file systems that are not fsspec's own; huggingface_hub brings `hf`."""
WAITS = (0.5, 2.0, 8.0)
"""Seconds before something is tried for the second, third and fourth time."""
BLOCK = 8 << 20
"""Bytes of a file that are asked for at once when it is read in the middle."""


def is_address(name: str | Path) -> bool:
    """Whether this is an address and no path."""
    return ADDRESS.match(str(name)) is not None


def filesystem(address: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path in it."""
    import fsspec

    protocol = address.partition("://")[0].lower()
    options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
    try:
        return fsspec.core.url_to_fs(address, use_listings_cache=False, **options)  # type: ignore[no-any-return]
    except ImportError as error:
        package = PACKAGES.get(protocol, protocol)
        todo = "pip install 'braidlm[data]'" if package == "s3fs" else f"pip install {package}"
        raise BraidError(f"addresses `{protocol}://` need the package '{package}' ({error})", address, todo) from None
    except ValueError as error:
        known = "Known are s3, gs, hf, file, memory and all that fsspec knows."
        raise BraidError(f"this address cannot be read ({error})", address, known) from None


def attempt(address: str, do: Callable[[Any, str], Result]) -> Result:
    """`do(filesystem, path)`, tried again where the failure may pass."""
    for wait in (*WAITS, None):
        system, path = filesystem(address)
        try:
            return do(system, path)
        except Exception as error:
            if not _is_of_a_store(error):
                raise
            if (explained := _final(error, address)) is not None:
                raise explained from error
            if wait is None:
                raise _unreachable(error, address) from error
            time.sleep(wait)
    raise AssertionError("unreachable")


@contextmanager
def explained_address_errors(address: str) -> Iterator[None]:
    """Let what a file system raises be an error that says what to do."""
    try:
        yield
    except Exception as error:
        if not _is_of_a_store(error):
            raise
        raise _final(error, address) or _unreachable(error, address) from error


def open_address(address: str) -> BinaryIO:
    """A file to read, also from the middle."""
    file = attempt(address, lambda system, path: system.open(path, "rb", block_size=BLOCK))
    # The files of most stores are unbuffered, and know lines only as a whole.
    return cast(BinaryIO, file if isinstance(file, io.BytesIO) else io.BufferedReader(file, BLOCK))


def exists(address: str) -> bool:
    """Whether there is a file or folder."""
    return attempt(address, lambda system, path: bool(system.exists(path)))


def file_facts(address: str) -> tuple[int, str]:
    """The size of a file, and a mark that changes when it does."""
    return attempt(address, lambda system, path: (int(system.info(path)["size"]), str(system.ukey(path))))


def files_at(address: str) -> list[str]:
    """The addresses of a file, of the files in a folder, or of those that a pattern matches; in order."""

    def find(system: Any, path: str) -> list[str]:
        found = system.glob(path) if re.search(r"[*?\[]", path) else system.find(path)
        return [str(system.unstrip_protocol(name)) for name in sorted(found) if "/." not in name.removeprefix(path)]

    return attempt(address, find)


def read_json_at(address: str) -> dict[str, Any]:
    """The JSON object of a file."""

    def read(system: Any, path: str) -> str:
        if (size := system.info(path)["size"]) > MAX_BYTES:
            raise BraidError(f"this file has {size:,} bytes; at most {MAX_BYTES:,} are read", address)
        return str(system.cat_file(path).decode("utf-8"))

    return parse_json(attempt(address, read), address)  # type: ignore[no-any-return]


def write_at(address: str, data: bytes) -> None:
    """Write a small file in one piece."""
    attempt(address, lambda system, path: system.pipe_file(path, data))


def download(address: str, path: Path) -> None:
    """Copy a file to the disk."""
    attempt(address, lambda system, name: system.get_file(name, str(path)))


def upload(path: Path, address: str) -> None:
    """Copy a file from the disk."""
    attempt(address, lambda system, name: system.put_file(str(path), name))


def remove_at(address: str) -> None:
    """Remove a file."""
    attempt(address, lambda system, path: system.rm_file(path))


def _is_of_a_store(error: Exception) -> bool:
    """Whether an error tells of a store or its connection, and not of this disk or of a mistake in the code."""
    if isinstance(error, OSError):
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)
    return type(error).__module__ != "builtins" and not isinstance(error, BraidError | ValueError)


def _final(error: Exception, address: str) -> BraidError | None:
    """The error for what would fail in the same way again; None if it may pass."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return BraidError("there is nothing at this address", address, "Check the bucket and the name.")
    if names & {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "LocalTokenNotFoundError"}:
        todo = "Set the store's own variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or its profile."
        return BraidError(f"there are no credentials for this address ({error})", address, todo)
    if isinstance(error, PermissionError):
        return BraidError(f"the store refuses access ({error})", address, "Check the credentials and their rights.")
    return None


def _unreachable(error: Exception, address: str) -> BraidError:
    what = f"this address cannot be reached after {len(WAITS) + 1} attempts ({type(error).__name__}: {error})"
    return BraidError(what, address, "Check the connection and the endpoint, and run the same command again.")
