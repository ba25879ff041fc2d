"""Bits per byte of your own text: how well a model predicts it, comparable between tokenizers."""

from braidlm.evals.formats.held_out_text import read_text
from braidlm.evals.tasks.task import TASKS, Task


@TASKS.register("bits_per_byte")
class BitsPerByte(Task):
    """Any text that was not trained on."""

    description = "how well a model predicts text of yours, whatever its tokenizer; lower is better"
    size = "a file, or a folder of files"
    licence = "your own"
    metric = "bits per byte"
    locations = ("dev", "validation")
    fetch = "Give text that the models were not trained on: `--data bits_per_byte=FILE` or a folder of files."
    open = staticmethod(read_text)
