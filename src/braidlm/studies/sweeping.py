"""Studies under `braid train --multirun`: each combination is a study of its own, and all runs are in one table."""

from pathlib import Path
from typing import Any

from braidlm.model.config.strict import encode
from braidlm.studies.decoding import decode_study, load_study
from braidlm.studies.report import study


class SweptStudy:
    """The recipe of a study."""

    def load(self, recipe: str, overrides: list[str]) -> tuple[Path, dict[str, Any]]:
        """The folder and the content of a checked study."""
        loaded = load_study(recipe, overrides)
        return loaded.folder, encode(loaded)

    def check(self, folder: Path, content: dict[str, Any], fresh: bool) -> None:
        """Each run of the study checks its own folder."""

    def train(self, content: dict[str, Any], device: str | None, fresh: bool) -> None:
        """Run the study and write its report."""
        study(decode_study(content), device=device, fresh=fresh)
