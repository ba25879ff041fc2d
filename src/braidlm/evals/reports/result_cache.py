"""Cached results: what was scored once is not scored again, however often an evaluation is interrupted."""

import hashlib
import json
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.files import write_json
from braidlm.core.reading import read_json
from braidlm.evals.results import TaskResult

FOLDER = "kept"


class ResultCache:
    """A folder of results, each under the hash of what it depends on."""

    def __init__(self, folder: Path):
        self.folder = folder / FOLDER

    def find(self, key: dict[str, Any]) -> TaskResult | None:
        """The result for exactly this key; a damaged file counts as missing."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            return TaskResult.from_facts(read_json(path)["result"])
        except (BraidError, KeyError, TypeError, AttributeError):
            return None

    def write(self, key: dict[str, Any], result: TaskResult) -> None:
        """Write a result, atomically."""
        write_json(self._path(key), {"of": key, "result": result.facts()})

    def _path(self, key: dict[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{key['task']}-{digest[:24]}.json"
