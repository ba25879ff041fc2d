"""Results that are kept: what was scored once is not scored again, however often an evaluation is interrupted."""

import hashlib
import json
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.files import read_json, write_json
from braidlm.evals.reports.results import TaskResult

FOLDER = "kept"


class Kept:
    """A folder of results, each under the hash of what it depends on."""

    def __init__(self, folder: Path):
        self.folder = folder / FOLDER

    def find(self, facts: dict[str, Any]) -> TaskResult | None:
        """The result that was kept for exactly these facts; a damaged file is as good as none."""
        path = self._path(facts)
        if not path.is_file():
            return None
        try:
            return TaskResult.from_facts(read_json(path)["result"])
        except (BraidError, KeyError, TypeError, AttributeError):
            return None

    def keep(self, facts: dict[str, Any], result: TaskResult) -> None:
        """Write a result; it is there as a whole or not at all."""
        write_json(self._path(facts), {"of": facts, "result": result.facts()})

    def _path(self, facts: dict[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{facts['task']}-{digest[:24]}.json"
