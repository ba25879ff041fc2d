"""The code that a saved folder carries: all of this package as one file, so that plain transformers can open it."""

from importlib import import_module
from pathlib import Path

CODE_FILE = "modeling_braid.py"
IS_FOLDER_CODE = Path(__file__).name == CODE_FILE
"""Whether this is the one file of a saved folder, and not the package."""


def write_folder_code(folder: Path) -> None:
    """Write the code file of a model folder; a model that came from a folder writes the code it was opened with."""
    if IS_FOLDER_CODE:
        code = Path(__file__).read_text(encoding="utf-8")
    else:
        code = import_module(".bundle", __package__).bundle()
    (folder / CODE_FILE).write_text(code, encoding="utf-8")
