"""What a model folder computes, as plain transformers opens it; run as a script where braidlm cannot be imported.

    python check_folder.py FOLDERS OUT [--train]

FOLDERS holds NAME/ (a language model with its tokenizer) and NAME-classes/ (a classifier). OUT gets NAME.safetensors
and facts.json. Only torch, safetensors, transformers and, with --train, accelerate and peft are needed, in any version
that opens a model folder.
"""

import contextlib
import copy
import io
import json
import logging
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    dynamic_module_utils,
)

TEXTS = ["Once upon a time there was a small red boat.", "Tom has 3 apples."]
NEW_TOKENS = 6
LABELS = 3


def encode(tokenizer: Any) -> dict[str, Tensor]:
    """Two texts of different lengths, padded on the left."""
    tokenizer.padding_side = "left"
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def measure(model: Any, body: Any, classifier: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits, losses, gradients in evaluation and in training, generated ids, all layers and class scores."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    measured: dict[str, Tensor] = {}
    for mode in ("eval", "train"):  # in training there is dropout, noise in routers, and the routers' own losses
        model.train(mode == "train")
        model.zero_grad()
        torch.manual_seed(0)
        output = model(**batch, labels=labels)
        output.loss.backward()
        measured |= {f"{mode}.logits": output.logits.detach(), f"{mode}.loss": output.loss.detach()[None]}
        measured |= {f"{mode}.gradient.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.eval()
    with torch.no_grad():
        measured["generated"] = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
        first = {name: rows[:1] for name, rows in batch.items()}  # transformers drafts for one text at a time
        if not transformers.__version__.startswith("5.0."):  # whose drafts call a function of its own without a value
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "assistant_early_exit": 1}
            measured["drafted"] = model.generate(**first, **options)
        output = body(**batch, output_hidden_states=True, output_attentions=True)
        measured |= {f"hidden.{layer}": states for layer, states in enumerate(output.hidden_states)}
        measured |= {f"attentions.{layer}": weights for layer, weights in enumerate(output.attentions)}
        measured["classes"] = classifier(**batch).logits
    return {name: tensor.clone().contiguous() for name, tensor in measured.items()}


def check(folder: Path, out: Path, trains: bool) -> dict[str, Any]:
    """Open one folder, save what it computes, save the model again and open that too."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model, body = _open(AutoModelForCausalLM, folder), _open(AutoModel, folder)
    classifier = _open(AutoModelForSequenceClassification, folder.with_name(f"{folder.name}-classes"))
    batch = encode(tokenizer)
    measured = measure(model, body, classifier, batch)
    save_file(measured, out / f"{folder.name}.safetensors")

    model.save_pretrained(out / folder.name)
    again = _open(AutoModelForCausalLM, out / folder.name)
    headless = _open(AutoModelForSequenceClassification, folder, num_labels=LABELS)  # its new head is random
    facts = {
        "classes": [type(m).__name__ for m in (model, body, classifier)],
        "text": tokenizer.batch_decode(measured["generated"]),
        "code": [path.name for path in (out / folder.name).rglob("*.py")],
        "again": bool(torch.equal(_logits(again, batch), _logits(model, batch))),
        "new_head": list(_logits(headless, batch).shape),
        "half": [_half_precision_error(model, batch, dtype) for dtype in (torch.bfloat16, torch.float16)],
        "example": _run_example(folder),
    }
    if trains:
        facts["trainer"] = train_with_trainer(folder, batch, out / f"{folder.name}-trained")
        facts["lora"] = train_with_lora(folder, batch, out / f"{folder.name}-lora")
    return facts


def train_with_trainer(folder: Path, batch: dict[str, Tensor], out: Path) -> dict[str, Any]:
    """All parameters for a few steps; the saved model opens again and computes what the trained one does."""
    model = _open(AutoModelForCausalLM, folder)
    before, after = _train(model, batch, out)
    model.save_pretrained(out)
    return {"losses": [before, after], "again": _same(_open(AutoModelForCausalLM, out), model, batch)}


def train_with_lora(folder: Path, batch: dict[str, Tensor], out: Path) -> dict[str, Any]:
    """Adapters on every linear layer; they alone are trained and saved, and merge into the model."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base = _open(AutoModelForCausalLM, folder)
    original = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    # Older versions of PEFT do not find what a layer adds to a shared matrix once the matrix has an adapter.
    others = r".*\.lora\.\w+"
    config = LoraConfig(r=4, target_modules="all-linear", exclude_modules=others, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    before, after = _train(model, batch, out)
    model.save_pretrained(out)
    opened = PeftModel.from_pretrained(_open(AutoModelForCausalLM, folder), out).eval()
    again = _same(opened, model, batch)
    trained = _logits(model, batch)
    merged = model.merge_and_unload()
    changed = [name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, original[name])]
    merge_error = (_logits(merged, batch) - trained).abs().max().item()
    return {"losses": [before, after], "again": again, "merge_error": merge_error, "changed": changed}


def _train(model: Any, batch: dict[str, Tensor], out: Path) -> tuple[float, float]:
    """The loss before and after a few steps on one batch."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in batch["input_ids"]]
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        max_steps=8,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    before = _loss(model, batch)
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    return before, _loss(model, batch)


def _half_precision_error(model: Any, batch: dict[str, Tensor], dtype: torch.dtype) -> float:
    """The mean difference of the logits in half precision, in units of their standard deviation."""
    wide = _logits(model, batch)
    return float((_logits(copy.deepcopy(model).to(dtype), batch).float() - wide).abs().mean() / wide.std())


def _run_example(folder: Path) -> str:
    """What the example of the model card prints, run in the folder as the card's reader would."""
    example = (folder / "README.md").read_text().split("```python")[1].split("```")[0]
    example = example.replace("max_new_tokens=50", f"max_new_tokens={NEW_TOKENS}")  # enough to see that it runs
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(example, {})
    return printed.getvalue()


def _open(auto: Any, folder: Path, **options: Any) -> Any:
    return auto.from_pretrained(folder, trust_remote_code=True, **options).eval()


@torch.no_grad()
def _logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).logits  # type: ignore[no-any-return]


@torch.no_grad()
def _loss(model: Any, batch: dict[str, Tensor]) -> float:
    model.eval()
    return float(model(batch["input_ids"], labels=batch["input_ids"]).loss)


def _same(a: Any, b: Any, batch: dict[str, Tensor]) -> bool:
    # Not to the bit: sums round as the memory that they read is aligned.
    return bool(torch.allclose(_logits(a, batch), _logits(b.eval(), batch), rtol=1e-5, atol=1e-5))


def parse_code_once() -> None:
    """Transformers looks for imports in the code of a folder for all that it opens there, half a second each time."""

    def once(parse: Any) -> Any:
        parsed: dict[bytes, list[str]] = {}

        def imports_of(file: Any) -> list[str]:
            content = Path(file).read_bytes()
            if content not in parsed:
                parsed[content] = parse(file)
            return list(parsed[content])

        return imports_of

    for name in ("get_imports", "get_relative_imports"):
        setattr(dynamic_module_utils, name, once(getattr(dynamic_module_utils, name)))


def _compile_code_once() -> None:
    """The folders that are checked carry the same code, of which Python would compile each copy."""
    compile_source, compiled = SourceFileLoader.source_to_code, {}

    def code_of(loader: SourceFileLoader, data: Any, path: Any) -> Any:
        if data not in compiled:
            compiled[data] = compile_source(loader, data, path)
        return compiled[data]

    SourceFileLoader.source_to_code = code_of


def main(folders: Path, out: Path, trains: bool) -> None:
    """Check every language model of a folder and write the facts."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    parse_code_once()
    _compile_code_once()
    names = sorted(path.name for path in folders.iterdir() if not path.name.endswith("-classes"))
    facts: dict[str, Any] = {name: check(folders / name, out, trains) for name in names}
    facts["transformers"] = transformers.__version__
    facts["imported"] = sorted(name for name in sys.modules if name.split(".")[0] == "braidlm")
    (out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), "--train" in sys.argv[3:])
