"""Files of a data set that may be packed with gzip."""

import gzip
import zlib
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.evals.files.json_rows import TextFile


def read_files(place: Path, pattern: str = "*.jsonl") -> list[TextFile]:
    """A file, or those below a folder that fit a pattern, unpacked if they end with `.gz`."""
    paths = [place] if place.is_file() else sorted({*place.rglob(pattern), *place.rglob(f"{pattern}.gz")})
    if not paths:
        raise BraidError(f"there are no files {pattern} or {pattern}.gz here", str(place))
    found = []
    for path in paths:
        content = path.read_bytes()
        if path.suffix == ".gz":
            try:
                content = gzip.decompress(content)
            except (EOFError, gzip.BadGzipFile, zlib.error):
                raise BraidError("this file is damaged: it cannot be unpacked", str(path)) from None
        found.append(TextFile(path.name.removesuffix(".gz"), str(path), content))
    return found
