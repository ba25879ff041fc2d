"""The code that a saved folder carries: what it needs of this package as one file, so that transformers can open it."""

from importlib import import_module
from pathlib import Path
from typing import Any

CODE_FILE = "modeling_braid.py"
IS_FOLDER_CODE = Path(__file__).name == CODE_FILE
"""Whether this is the one file of a saved folder, and not the package."""


def write_folder_code(folder: Path, architecture: dict[str, Any]) -> None:
    """Write the code file of a model folder; a model that came from a folder writes the code it was opened with."""
    if IS_FOLDER_CODE:
        code = Path(__file__).read_text(encoding="utf-8")
    else:
        bundling = import_module(".bundle", __package__)
        code = bundling.bundle(bundling.names_in(architecture))
    (folder / CODE_FILE).write_text(code, encoding="utf-8")
