"""Bits per byte of your own text: how well a model predicts it, comparable between tokenizers."""

from pathlib import Path

from braidlm.evals.evaluated_model import Settings
from braidlm.evals.formats.held_out_text import HeldOutText, read_text
from braidlm.evals.tasks.task import TASKS, Task


@TASKS.register("bits_per_byte")
class BitsPerByte(Task):
    """Any text that was not trained on."""

    description = "how well a model predicts text of yours, whatever its tokenizer; lower is better"
    size = "a file, a folder of files, or a packed data set"
    licence = "your own"
    metric = "bits per byte"
    locations = ("dev", "validation")
    fetch = "Give text that the models were not trained on: `--data bits_per_byte=PATH`, text or a packed data set."
    uses = ("field", "joiner", "answer", "template", "separator", "held_out", "half", "max_tokens", "window")
    version = 2

    def open(self, path: Path) -> HeldOutText:
        return read_text(path)

    def open_with(self, path: Path, settings: Settings) -> HeldOutText:
        return read_text(path, settings)
