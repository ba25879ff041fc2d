"""Models with routers whose choices are known because they were set by hand."""

from typing import Any

import torch

from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.router import TopKRouter
from tests.inspection.path_models import TOKENIZER
from tests.tiny_models import tiny_model

FOUR = ["stories", "maths", "signs", "spare"]


def routed_model(**options: Any) -> BraidForCausalLM:
    """Two layers of four paths, of which two serve each token."""
    join = {"kind": "routed", "top_k": 2} | options.pop("join", {})
    parallel = {"layers": 2, "paths": FOUR, "join": join, **options}
    return by_hand(stages=["block", {"parallel": parallel}, "block"])


def expert_model(experts: int = 4, top_k: int = 2) -> BraidForCausalLM:
    """No paths: experts on projections, and as the feed-forward parts and attentions of a block."""
    project = {"to": 16, "experts": {"names": experts, "router": {"top_k": top_k}}}
    bank = {"experts": {"names": experts, "router": {"top_k": top_k}}}
    block = {"feed": {"kind": "swiglu", "hidden": 24, **bank}, "attention": {"heads": 4, **bank}}
    return by_hand(stages=["block", {"project": project}, "block"], block=block)


def by_hand(**architecture: Any) -> BraidForCausalLM:
    """Blocks that leave the stream as it is, so that routers see the character; see `routers_by_character`."""
    model = tiny_model(vocab_size=TOKENIZER.vocab_size, context=64, tie_embeddings=False, **architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".attention.out.weight", ".feed.out.weight", ".bank.out.weight")):
                parameter.zero_()
        rows = model.model.embedding.weight
        rows.zero_()
        for token in range(256):
            kind = 0 if chr(token).isascii() and chr(token).isalpha() else 1 if chr(token) in "0123456789" else 2
            rows[token, kind] = 1.0
    return model


@torch.no_grad()
def routers_by_character(model: BraidForCausalLM) -> BraidForCausalLM:
    """Of the routers that read the stream as it is: letters take the first choice, digits the second, others the third,
    with weight 3/4; the first choice after it (letters: the second) has the rest."""
    for router in routers(model):
        router.scores.weight.zero_()
        router.scores.bias.fill_(-9.0)
        for kind in range(3):
            router.scores.weight[kind, kind] = 12.0 + torch.log(torch.tensor(3.0))
            router.scores.weight[1 if kind == 0 else 0, kind] = 12.0
    return model


def routers(model: BraidForCausalLM) -> list[TopKRouter]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]
