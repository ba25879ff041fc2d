"""Members: against decoders run apart and combined by hand in float64, with caches, padding, beams and switches."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from braidlm.core.errors import BraidError
from braidlm.edits.composing.path_models import posterior_shares
from braidlm.model.members import MembersForCausalLM
from braidlm.model.paths.switches import use_paths
from braidlm.opening.members import members_config, of_decoders
from tests.tiny_decoders import CONFIGS
from tests.tiny_models import random_ids

KINDS = ("llama", "gpt2", "qwen2", "gpt_neox")
JUDGED: dict[str, dict[str, Any]] = {
    "average": {"judged": False, "rule": {}},
    "posterior": {"judged": True, "rule": {}},
    "window": {"judged": True, "rule": {"window": 3}},
    "settle": {"judged": True, "rule": {"settle": 4}},
}


def decoders(kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Random decoders that do not agree, in float64."""
    made = {name: AutoModelForCausalLM.from_config(CONFIGS[name]).double().eval() for name in kinds}
    with torch.no_grad():
        for parameter in (p for one in made.values() for p in one.parameters()):
            parameter.normal_(std=0.3)
    return made


def joined(made: dict[str, Any], shares: Sequence[float] = (), **how: Any) -> MembersForCausalLM:
    shares = shares or [1.0] * len(made)
    members = [{"name": name, "decoder": name, "share": share} for name, share in zip(made, shares, strict=True)]
    how = {**JUDGED["average"], **how}
    config = members_config({name: one.config for name, one in made.items()}, members, eos_token_id=0, **how)
    return of_decoders(config, made)


def by_hand(each: Tensor, ids: Tensor, judged: bool, rule: dict[str, Any], shares: Sequence[float] = ()) -> Tensor:
    """The logarithms of the averaged probabilities, of the members' own [member, batch, time, vocabulary]."""
    weights = torch.tensor(shares or [1.0] * len(each), dtype=torch.float64).log()[:, None, None]
    if judged:
        weights = weights + posterior_shares(each, ids, **rule)
    return (each + weights.log_softmax(0)[..., None]).logsumexp(0)


@torch.no_grad()
def apart(made: dict[str, Any], ids: Tensor) -> Tensor:
    return torch.stack([one(ids, use_cache=False).logits.log_softmax(-1) for one in made.values()])


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("how", JUDGED)
@pytest.mark.parametrize("shares", [(), (0.5, 0.1, 0.3, 0.1)])
@torch.no_grad()
def test_the_average_of_decoders_of_four_architectures(how: str, shares: Sequence[float]) -> None:
    made, ids = decoders(), random_ids(3, 12, vocab_size=320)
    each, model = apart(made, ids), joined(made, shares, **JUDGED[how])
    wanted = by_hand(each, ids, **JUDGED[how], shares=shares)
    close(model(ids).logits, wanted)
    close(model(ids, logits_to_keep=2).logits, wanted[:, -2:])
    assert (wanted - each).abs().amax((1, 2, 3)).min() > 0.1, "members that agree would prove nothing"


@pytest.mark.parametrize("how", JUDGED)
@torch.no_grad()
def test_a_cache_and_left_padding_change_nothing(how: str) -> None:
    made, ids, pad = decoders(("llama", "gpt2")), random_ids(2, 12, vocab_size=320), 4
    model = joined(made, **JUDGED[how])
    wanted = by_hand(apart(made, ids), ids, **JUDGED[how])
    padded, mask = F.pad(ids, (pad, 0), value=1), F.pad(torch.ones_like(ids), (pad, 0))
    close(model(padded, attention_mask=mask).logits[:, pad:], wanted)
    cache, found, begin = None, [], 0
    for end in (pad + 5, pad + 6, pad + 12):
        output = model(padded[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache, begin = output.past_key_values, end
        assert cache.get_seq_length() == end
        found.append(output.logits)
    close(torch.cat(found, 1)[:, pad:], wanted)
    real = torch.cat((ids, ids[:, :3]), 1), torch.ones(2, 15, dtype=torch.long)
    real[1][:, 12:] = 0
    close(model(real[0], attention_mask=real[1]).logits[:, :12], wanted)


@pytest.mark.parametrize("how", [how for how, options in JUDGED.items() if options.get("judged")])
@torch.no_grad()
def test_shares_are_those_of_the_text_without_its_padding(how: str) -> None:
    made, ids, pad = decoders(("llama", "gpt2")), random_ids(2, 9, vocab_size=320), 4
    model = joined(made, (0.7, 0.3), **JUDGED[how])
    before = torch.tensor([0.7, 0.3], dtype=torch.float64).log()[:, None, None]
    said = posterior_shares(apart(made, ids), ids, **JUDGED[how].get("rule", {}))
    wanted = (before + said).softmax(0).movedim(0, -1)
    close(model.log_shares(ids).exp(), wanted)
    padded, mask = F.pad(ids, (pad, 0), value=1), F.pad(torch.ones_like(ids), (pad, 0))
    close(model.log_shares(padded, mask)[:, pad:].exp(), wanted)


@pytest.mark.parametrize("how", JUDGED)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_with_a_cache_is_generation_without(how: str, options: dict[str, Any]) -> None:
    model, ids = joined(decoders(("gpt2", "qwen2")), **JUDGED[how]), random_ids(2, 5, vocab_size=320)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 1, **options}
    cached, plain = (
        model.generate(ids, attention_mask=mask, use_cache=use_cache, **settings) for use_cache in (True, False)
    )
    assert cached.shape == (2, 11)
    assert torch.equal(cached, plain)


@torch.no_grad()
def test_members_that_are_switched_off_were_never_there() -> None:
    made, ids = decoders(), random_ids(2, 9, vocab_size=320)
    model = joined(made, (0.4, 0.3, 0.2, 0.1), **JUDGED["posterior"])
    use_paths(model, ["gpt_neox", "llama"])
    rest = joined({name: made[name] for name in ("llama", "gpt_neox")}, (0.4, 0.1), **JUDGED["posterior"])
    assert torch.equal(model(ids).logits, rest(ids).logits)
    use_paths(model, ["gpt2"])
    close(model(ids).logits, made["gpt2"](ids).logits.log_softmax(-1))
    with pytest.raises(BraidError, match=r"no path 'lama'\. Did you mean 'llama'"):
        use_paths(model, ["lama"])


@torch.no_grad()
def test_the_smaller_vocabulary_gives_no_probability_to_other_tokens() -> None:
    made = decoders(("llama", "gpt2"))
    small = AutoModelForCausalLM.from_config(
        type(CONFIGS["qwen2"])(**{**CONFIGS["qwen2"].to_dict(), "vocab_size": 300})
    )
    made["qwen2"] = small.double().eval()
    ids = random_ids(2, 9, vocab_size=300)
    each = [one(ids).logits.softmax(-1) for one in made.values()]
    each[2] = F.pad(each[2], (0, 20))
    found = joined(made)(ids).logits
    close(found.exp(), torch.stack(each).mean(0))
    assert found.isfinite().all()


def test_loss_and_gradients_are_those_of_the_average() -> None:
    made, ids = decoders(("llama", "gpt2")), random_ids(2, 9, vocab_size=320)
    output = joined(made)(ids, labels=ids, output_hidden_states=True)
    each = torch.stack([one(ids).logits.log_softmax(-1) for one in made.values()])
    wanted = F.nll_loss(by_hand(each, ids, judged=False, rule={})[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(output.loss, wanted.float())  # transformers computes it in float32
    assert output.hidden_states[-1].shape == (2, 9, 32)
    parameters = [p for one in made.values() for p in one.parameters()]
    found, expected = (torch.autograd.grad(loss, parameters) for loss in (output.loss, wanted))
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6)


def test_what_members_do_not_take_is_refused() -> None:
    model, ids = joined(decoders(("llama", "gpt2")), **JUDGED["posterior"]), random_ids(1, 4, vocab_size=320)
    with pytest.raises(BraidError, match="members read token ids"):
        model(inputs_embeds=torch.zeros(1, 4, 16))
    with pytest.raises(BraidError, match="members have a cache of their own kind, and this is a DynamicCache"):
        model(ids, past_key_values=DynamicCache(), use_cache=True)
    with pytest.raises(BraidError, match="judges its members by one text in each row"):
        model(ids, attention_mask=torch.zeros(1, 1, 4, 4).double())
    with pytest.raises(BraidError, match="cannot forget its last tokens"):
        model(ids).past_key_values.crop(2)
