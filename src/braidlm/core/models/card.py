"""The model card (README.md) of a model folder."""

import json
from typing import Any

from braidlm.core.console import count
from braidlm.core.models.accounting import model_cost
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM


def model_card(name: str, config: BraidConfig, model: BraidForCausalLM, lineage: dict[str, Any]) -> str:
    """A short page: the model's size, how to use it, and where it came from."""
    cost = model_cost(model)
    architecture = config.decoded
    stages = ", ".join(f"{s.kind} x {getattr(s.options, 'layers', 1)}" for s in architecture.stages)
    facts = [
        ("parameters", f"{cost.parameters:,}"),
        ("active per token", f"{cost.active_parameters:,}"),
        ("forward FLOPs per token", f"{count(float(cost.flops_per_token))} at {architecture.context} tokens"),
        ("width", architecture.width),
        ("stages", stages),
        ("vocabulary", config.vocab_size),
        ("context", architecture.context),
    ]
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [braid]",
        "---",
        f"# {name}",
        "",
        f"Made with Braid (the Python package `braidlm`): {lineage.get('made_by', 'unknown')}.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {key} | {value} |" for key, value in facts),
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'folder = "."',
        "model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)",
        "tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
        'text = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**text, max_new_tokens=50)[0]))",
        "```",
        "",
        "`lineage.json` says where every part came from.",
    ]
    if training := lineage.get("training"):
        lines += ["", "Training so far:", "", "```json", json.dumps(training, indent=2), "```"]
    return "\n".join(lines) + "\n"
