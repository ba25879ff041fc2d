"""What stands in the page of a report."""

import json
import re
from pathlib import Path
from typing import Any


def charts_of(page: Path) -> dict[str, dict[str, Any]]:
    """The data of the charts of a page, by the names that their files have when a reader saves them."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', page.read_text(encoding="utf-8"))
    return {chart["name"]: chart for chart in map(json.loads, found)}
