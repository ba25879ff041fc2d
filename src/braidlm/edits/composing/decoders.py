"""Decoders of transformers as members of one folder: their probabilities are averaged, and each stays what it is."""

from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from braidlm.core import console
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.files import atomic_folder
from braidlm.core.models.logits import PROBE, UNCHANGED, check_promise
from braidlm.core.reading import given_path
from braidlm.edits.account import SOURCE
from braidlm.edits.composing.adapters import fill_adapters, members_of
from braidlm.edits.composing.path_models import after_averaging, averages, check_tokenizers, posterior_shares
from braidlm.model.config.registry import Choice
from braidlm.model.members import BASE, MembersConfig, MembersForCausalLM
from braidlm.model.paths.switches import use_paths
from braidlm.opening.braid import BRAID, FROM_THE_SOURCE
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.gated_folders import write_whole_files
from braidlm.opening.gating import MEMBERS
from braidlm.opening.members import members_config, of_decoders, without_members
from braidlm.opening.opened_model import OpenedModel


def are_decoders(models: Sequence[OpenedModel]) -> bool:
    """Whether all of these are decoders that transformers has itself, and none is a model of Braid's."""
    return all(isinstance(one, OpenedDecoder) and one.kind != BRAID and _is_known(one.kind) for one in models)


def _is_known(kind: str) -> bool:
    return kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING


def compose_decoders(
    models: Mapping[str, OpenedDecoder], join: Choice, out: str | Path | None, record: dict[str, Any], dry_run: bool
) -> Path | None:
    """Write one folder of several decoders, after it has been opened again and gives the average of theirs."""
    for name, one in models.items():
        _check_member(name, one)
    check_tokenizers(list(models.values()), list(models))
    shares = _shares(list(models), join)
    types = {getattr(one.config, "dtype", None) or torch.float32 for one in models.values()}
    # The sum of a rounded matrix and its adapters would be rounded again.
    exact = len(types) > 1 or any(part.has_lora for one in models.values() for part in one.parts)
    dtype = torch.float32 if exact else next(iter(types))
    parts = members_of(models)
    members = [{"name": name, "share": shares[name], **part} for name, part in parts.items()]
    rule = vars(join.options) if join.kind == "posterior" else {}
    # Of adapters that share their base, that.
    kept = {name: one.parts[-1] if "lora" in parts[name] else one for name, one in models.items()}
    whole = {str(parts[name]["decoder"]): one for name, one in kept.items()}
    configs = {name: one.config for name, one in whole.items()}
    first = next(iter(models.values())).tokenizer
    roles = {f"{role}_token_id": getattr(first, f"{role}_id") for role in ("eos", "bos", "pad")}
    config = members_config(configs, members, join.kind == "posterior", rule, **roles)
    sizes = {name: sum(p.numel() for p in one.skeleton(dtype).parameters()) for name, one in models.items()}
    sized = {name: "LoRA" if "lora" in parts[name] else f"{size:,} parameters" for name, size in sizes.items()}
    lines = [f"  {name}: {one.kind}, {sized[name]}, from {one.title}" for name, one in models.items()]
    how = "averaged by the shares that are given" if join.kind == "mixture" else averages[join.kind].how
    notes = [f"the models stay as they are, and the probabilities that they give are {how}"]
    notes += [
        f"'{name}': its LoRA adapters are merged into its matrices"
        for name, one in models.items()
        if one.has_lora and "lora" not in parts[name]
    ]
    if BASE in whole:
        sharing = ", ".join(name for name, part in parts.items() if part["decoder"] == BASE)
        notes.append(f"{sharing} share the weights of one base, {whole[BASE].title}")
    notes.append(f"weights are written as {str(dtype).removeprefix('torch.')}")
    title = f"Compose {' + '.join(models)} as members of one model, join {join.kind}"
    console.say_plan([title, *lines, *(f"  note: {note}" for note in notes)], [], dry_run)
    if dry_run:
        return None
    assert out is not None
    rows, context = min(one.vocab_size for one in whole.values()), config.max_position_embeddings
    ids = _probe(rows, context)
    expected = _averaged(models, dtype, shares, config, ids, rows)
    model = of_decoders(config, {name: one.load(dtype=dtype) for name, one in whole.items()})
    fill_adapters(model, models)
    lineage = record | {"sources": [{"name": name, **_known(one)} for name, one in models.items()]}
    what = "average of the models'" + (", weighed by the text so far," if config.judged else "")
    promise = f"the probabilities should be the {what} to {UNCHANGED:g}, and one differs by"
    folder = _write(model, out, lineage, next(iter(models.values())), dtype, ids, expected, promise)
    console.say(after_averaging(how, folder))
    return folder


def _known(one: OpenedDecoder) -> dict[str, Any]:
    """Which model this is, for the lineage of a model that is made of it, with what was known of it."""
    lineage = one.lineage or {}
    return {**one.record(), "format": one.kind, **{key: lineage[key] for key in FROM_THE_SOURCE if lineage.get(key)}}


def _check_member(name: str, one: OpenedDecoder) -> None:
    """Refuse a decoder that cannot be a member, before a weight is read."""
    if one.kind == MEMBERS:
        what = f"'{name}' has members itself: {', '.join(one.config.names)}"
        raise BraidError(what, str(one.folder), "Compose the folders that it was made of; lineage.json names them.")
    if one.is_gated:
        what = f"'{name}' has gates, whose code a folder of members does not carry"
        raise BraidError(what, str(one.folder), "Name its base, or LoRA adapters in place of gates.")
    one.check_with_tokenizer()
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(one.config)]
    if "past_key_values" not in signature(kind.forward).parameters:
        what = f"'{name}' is a '{one.kind}' model, which keeps no keys and values to continue a text with"
        raise BraidError(what, str(one.folder), "Compose decoders with attention.")


def _shares(names: Sequence[str], join: Choice) -> dict[str, float]:
    """Each member's share of the average."""
    if join.kind != "mixture":
        return dict.fromkeys(names, 1.0)
    given = join.options.shares
    if join.options.per_token or given is None:
        what = "the shares of decoders of transformers are given, and not learned"
        equal = ", ".join([f"{1 / len(names):.2g}"] * len(names))
        todo = f'`--join "{{kind: mixture, shares: [{equal}]}}"`, or convert the models first (`braid convert`).'
        raise BraidError(what, "join", todo)
    if len(given) != len(names):
        what = f"{len(given)} shares were given for {len(names)} models"
        raise BraidError(what, "join.shares", f"Give one for each of {', '.join(names)}, in this order.")
    return dict(zip(names, given, strict=True))


@torch.no_grad()
def _averaged(
    models: Mapping[str, OpenedDecoder],
    dtype: torch.dtype,
    shares: Mapping[str, float],
    config: MembersConfig,
    ids: Tensor,
    rows: int,
) -> Tensor:
    """The average of the log-probabilities of models run apart, by hand; one of them is in memory at a time."""
    logits = [one.load(dtype=dtype)(ids).logits for one in models.values()]
    each = torch.stack([one.float().log_softmax(-1)[..., :rows] for one in logits])
    weights = torch.tensor([shares[name] for name in models]).log()[:, None, None]
    if config.judged:
        weights = weights + posterior_shares(each, ids, config.window, config.settle)
    return (each + weights.log_softmax(0)[..., None]).logsumexp(0)


def _probe(rows: int, context: int | None) -> Tensor:
    """Random ids of tokens that all members know, at which probabilities are compared."""
    time = min(PROBE[1], context or PROBE[1])
    return torch.randint(rows, (PROBE[0], time), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _write(
    model: PreTrainedModel,
    out: str | Path,
    lineage: dict[str, Any],
    source: OpenedDecoder,
    dtype: torch.dtype,
    ids: Tensor,
    expected: Tensor,
    promise: str,
) -> Path:
    """Write the folder in one atomic step, after it has been opened again and gives these log-probabilities."""
    folder = given_path(out)
    with atomic_folder(folder) as scratch:
        write_whole_files(model, scratch, lineage, folder.name, beside=source.tokenizer_files())
        found = OpenedDecoder(scratch).load(dtype=dtype)(ids).logits.float().log_softmax(-1)
        check_promise(promise, expected, found[..., : expected.shape[-1]])
    return folder


def withdraw_members(
    source: OpenedDecoder, names: Sequence[str], out: str | Path | None, record: dict[str, Any], dry_run: bool
) -> Path | None:
    """Write the folder without these members, as if they had never been there."""
    known = source.config.names
    for name in names:
        if name not in known:
            raise BraidError(f"the model has no member '{name}'.{did_you_mean(name, known)}", source.title)
    left = [name for name in known if name not in names]
    if not names or not left:
        what = "name the members that leave (--paths); at least one must stay"
        raise BraidError(what, source.title, f"There are {', '.join(known)}.")
    stay = f"{', '.join(left)} {'stays' if len(left) == 1 else 'stay'}"
    title = f"Withdraw {', '.join(name for name in known if name in names)} from {source.title}: {stay}"
    console.say_plan([title], [], dry_run)
    if dry_run:
        return None
    assert out is not None
    dtype = getattr(source.config, "dtype", None) or torch.float32
    model: MembersForCausalLM = source.load(dtype=dtype)
    use_paths(model, left)
    rows = min(one.config.get_text_config().vocab_size for one in model.decoders.values())  # type: ignore[operator, union-attr]
    ids = _probe(rows, model.config.max_position_embeddings)
    expected = model(ids).logits.log_softmax(-1).detach()[..., :rows]
    lineage = record | {"sources": [{"name": SOURCE, **_known(source)}]}
    promise = "the others should be averaged as if these had been switched off, and a log-probability differs by"
    return _write(without_members(model, left), out, lineage, source, dtype, ids, expected, promise)
