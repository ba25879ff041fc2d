"""A saved folder works where braidlm cannot be imported: plain transformers, with the code the folder carries."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from braidlm.core.decoding.decoder import Decoder, Sampling, decode_tokens
from braidlm.core.models.folders import save_model
from braidlm.model.modeling_braid import BraidForSequenceClassification
from tiny_models import ToyTokenizer, random_ids, randomised, tiny_config, tiny_model
from without_braid import WITHOUT_BRAID

SCRIPT = (
    WITHOUT_BRAID
    + """

import json, os, torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

folder, classifier, out = sys.argv[1:]
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
body = AutoModel.from_pretrained(folder, trust_remote_code=True)
judge = AutoModelForSequenceClassification.from_pretrained(classifier, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
text = tokenizer("w3 w1 w4 w1 w5", return_tensors="pt")
ids = text["input_ids"]
with torch.no_grad():
    found = {"logits": model(ids).logits, "hidden": body(ids).last_hidden_state, "classes": judge(ids).logits}
found["generated"] = model.generate(**text, max_new_tokens=9, do_sample=False)
save_file({name: tensor.contiguous() for name, tensor in found.items()}, out + "/found.safetensors")
model.save_pretrained(out + "/again")
facts = {
    "modules": sorted(m for m in sys.modules if m.split(".")[0] == "braidlm"),
    "classes": [type(m).__name__ for m in (model, body, judge)],
    "eos": model.generation_config.eos_token_id,
    "text": tokenizer.decode(found["generated"][0]),
}
print(json.dumps(facts), flush=True)
os.chdir(folder)
exec(open("README.md").read().split("```python")[1].split("```")[0])  # the card's own example
"""
)


def test_a_folder_needs_only_transformers(tmp_path: Path) -> None:
    tokenizer = ToyTokenizer()
    model = tiny_model()
    folder = save_model(model, tmp_path / "model", tokenizer, {"made_by": "a test"})
    config = tiny_config()
    config.num_labels = 3
    classifier = randomised(BraidForSequenceClassification(config)).eval()
    classifier.save_pretrained(tmp_path / "classifier")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HOME": str(tmp_path / "hub")}
    arguments = [str(folder), str(tmp_path / "classifier"), str(elsewhere)]
    done = subprocess.run(
        [sys.executable, "-I", "-c", SCRIPT, *arguments],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told, example = done.stdout.strip().split("\n")
    facts = json.loads(told)
    assert example.startswith("<eos> <eos>")  # this tokenizer knows none of the example's words
    assert facts["modules"] == []
    assert facts["classes"] == ["BraidForCausalLM", "BraidModel", "BraidForSequenceClassification"]
    assert facts["eos"] == tokenizer.eos_id
    assert facts["text"].startswith("w3 w1 w4 w1 w5")

    found = load_file(elsewhere / "found.safetensors")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        assert torch.equal(found["logits"], model(ids).logits)
        assert torch.equal(found["hidden"], model.model(ids).last_hidden_state)
        assert torch.equal(found["classes"], classifier(ids).logits)
    decoder = Decoder(model, 1, 32)
    ours = [t[0] for t, _ in decode_tokens(decoder, ids.tolist(), 9, Sampling(0), eos_id=tokenizer.eos_id)]
    assert found["generated"][0, 5:].tolist() == ours
    # What they save again is whole too.
    saved = {path.name for path in (elsewhere / "again").iterdir()}
    assert {"modeling_braid.py", "configuration_braid.py", "model.safetensors", "config.json"} <= saved


def test_a_folder_carries_every_file_of_the_model_that_it_needs(tmp_path: Path) -> None:
    from braidlm.model import modeling_braid

    folder = save_model(tiny_model(), tmp_path / "model", None, {})
    source = Path(modeling_braid.__file__).parent
    carried = {path.name for path in folder.glob("*.py")}
    above = {"__init__.py", "accounting.py", "decoding.py", "cache.py"}  # used from outside the model only
    assert carried == {path.name for path in source.glob("*.py")} - above
    for name in carried:
        assert (folder / name).read_text() == (source / name).read_text()


def test_the_same_ids_give_the_same_logits_after_a_round_trip_through_auto_classes(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model, ids = tiny_model(), random_ids(1, 6)
    folder = save_model(model, tmp_path / "model", None, {})
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).vocab_size == 37
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
