"""history.jsonl: when and on what a run was started, each time, and the errors that ended it.

It is beside the metrics and not among them, because those of a run that was stopped and went on are those of one that
never was.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from braidlm.core.files import explained_disk_errors
from braidlm.core.models.runs import HISTORY


def record_event(run: Path, kind: str, **facts: Any) -> None:
    """One line more, with the time."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    with explained_disk_errors(run / HISTORY), open(run / HISTORY, "a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "time": time, **facts}, ensure_ascii=False) + "\n")
