"""The composed model in memory: fresh weights by a seed, all others read one after another."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from braidlm.core.models.accounting import skeleton
from braidlm.edits.account import Account, Part
from braidlm.edits.sources import Source
from braidlm.edits.starting import begin_as_mean
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM


def assemble(
    config: BraidConfig, account: Account, sources: Mapping[str, Source], seed: int, start: str
) -> BraidForCausalLM:
    """The model that the account describes; besides its own weights only one tensor's parts are in memory at a time."""
    model = skeleton(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for address, module in model.named_modules():
            own = [f"{address}.{name}" for name, _ in module.named_parameters(recurse=False)]
            if own and all(name in account.fresh for name in own):
                _begin(model, module)
    if start == "mean":
        begin_as_mean(model)

    def read(part: Part) -> Tensor:
        return sources[part.source].read(part.tensor)

    taken = {name: origin.make(read) for name, origin in account.taken.items()}
    if config.tie_word_embeddings:
        taken["head.weight"] = taken["model.embedding.weight"]
    left = model.load_state_dict(taken, strict=False, assign=True)
    model.tie_weights()
    assert set(left.missing_keys) == set(account.fresh), "what is not taken is fresh"
    assert not any(tensor.is_meta for tensor in model.state_dict().values()), "every tensor has its numbers"
    return model.eval()


def _begin(model: BraidForCausalLM, module: nn.Module) -> None:
    """Memory for a module's own parameters, filled as the model's initialisation says."""
    module.to_empty(device="cpu", recurse=False)
    model._init_weights(module)
