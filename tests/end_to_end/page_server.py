"""What the page is tested with: tiny models with parts, names that are script, a run that goes on, and a server."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from braidlm.core.models.folders import save_model
from braidlm.core.report.rendering import write
from braidlm.core.report.report import Report
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.serving.api.app import create_app
from braidlm.serving.inspect.folders import ServedFolders
from braidlm.serving.inspect.router import router
from braidlm.serving.models import ServedModels
from braidlm.serving.serve import _listen, make_server
from tests.tiny_models import BASE, randomised, tiny_config

SCRIPT = "<img src=x onerror=alert(1)>"
"""What must be shown as text wherever it stands."""
HOSTILE = """<!doctype html><html><head><meta name="generator" content="Braid 0"><title>Hostile</title></head>
<body><p></p><script>const say = (word) => document.querySelector("p").append(`${origin} ${word}`);
fetch("/braid/models").then(() => say("reached"), () => say("refused"));</script></body></html>"""
"""A report that a stranger put into a folder, which tries to read from the server."""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
PARALLEL = {"layers": 2, "paths": ["stories", "maths"], "join": {"kind": "gumbel_v1"}}
TWO_PATHS = {"stages": ["block", {"parallel": PARALLEL}]}
EXPERTS = {"block": {"feed": {"kind": "mlp", "hidden": 24, "experts": {"names": 4}}}}


def save_models(folder: Path) -> list[Path]:
    """Two paths, experts, and a model whose name and lineage are script."""
    return [
        _save(folder / "paths", "made by a test", 0, **TWO_PATHS),
        _save(folder / "experts", "made by a test", 1, **EXPERTS),
        _save(folder / f"named {SCRIPT}", SCRIPT, 2),
    ]


def _save(folder: Path, made_by: str, seed: int, **architecture: Any) -> Path:
    tokenizer = bytes_tokenizer()
    tokenizer.settings["chat_template"] = TEMPLATE
    config = tiny_config(tokenizer.vocab_size, **{**BASE, "context": 160, "positions": "learned", **architecture})
    config.eos_token_id = None  # so that random weights do not end a text
    model = randomised(BraidForCausalLM(config), seed).eval()
    return save_model(model, folder, tokenizer, {"made_by": made_by})


def save_run(folder: Path) -> Path:
    """A run that goes on, with a sample that is script, and two reports beside it, one hostile."""
    run = folder / f"run {SCRIPT}"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: run\ntraining: {budget: 1000 steps}\n")
    for step in (10, 20, 30):
        add_record(run, step)
    add_line(run, {"kind": "sample", "step": 30, "prompt": f"Once {SCRIPT}", "text": f" upon {SCRIPT}"})
    write(Report(f"Report {SCRIPT}", "What came of it", f"Nothing but {SCRIPT}."), run, "report")
    (run / "hostile.html").write_text(HOSTILE)
    return run


def add_record(run: Path, step: int) -> None:
    """One more step of training, and what was validated at it."""
    usage = {"stages.0.layers.0.feed.router": [0.5, 0.3, 0.1, 0.1]}
    add_line(run, {"kind": "train", "step": step, "loss": 5 / step, "learning_rate": 1e-3, "usage": usage})
    add_line(run, {"kind": "validation", "step": step, "bits_per_byte": 3 / step, "loss": 6 / step})


def add_line(run: Path, record: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


@contextmanager
def page_server(names: Sequence[Path]) -> Iterator[str]:
    """The address of a server of these, in a thread."""
    served = ServedModels(names, "cpu", rows=4)
    listener = _listen("127.0.0.1", 0)
    server = make_server(create_app(served, (router(served, ServedFolders(names)),)), drain=5)
    thread = threading.Thread(target=lambda: asyncio.run(server._serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
