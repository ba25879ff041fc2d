"""`braid generate` as functions: continue prompts with the model of a folder, or with several side by side."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from braidlm.bridges.locate import on_disk
from braidlm.bridges.opening import OpenModel
from braidlm.core import console
from braidlm.core.decoding.decoder import Sampling, TokenDecoder
from braidlm.core.decoding.exits import EarlyExit
from braidlm.core.decoding.generation import continue_text, encode_prompts, next_tokens
from braidlm.core.decoding.prompts import Prompt, read_prompts
from braidlm.core.decoding.transformers_decoder import decoder_for
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError
from braidlm.core.models.names import StrPath, find_model, model_folder, name_sources
from braidlm.core.report.write import check_file, write_file
from braidlm.decoders.loading import OpenDecoder
from braidlm.decoders.opening import open_folder
from braidlm.model.config.ranges import CountOrZero, Length
from braidlm.model.config.strict import decode
from braidlm.serving.prompt_study import Continuation, Generation, PromptStudy, study_report


def generate(
    model: StrPath,
    prompts: str | Sequence[str],
    max_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    greedy: bool = False,
    top_next: int = 0,
    pauses: int = 0,
    paths: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
    exit_layer: int | None = None,
    exit_confidence: float | None = None,
    speculate: int | None = None,
    device: str = "auto",
    on_text: Callable[[int, str], None] | None = None,
) -> Generation:
    """Continue prompts with a model, named by its folder, its run, its study as STUDY/NAME, or as on the Hub.

    `on_text(prompt, piece)` is called with each new piece of text. `pauses` is the number of pause tokens after each
    prompt. With `paths`, only these paths are active; `without` are modules that are switched off. `exit_layer`,
    `exit_confidence` and `speculate` are those of `EarlyExit`.
    """
    early_exit = EarlyExit(exit_layer, exit_confidence, speculate)
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    sampling = _sampling(max_tokens, temperature, top_k, top_p, seed, greedy, top_next, pauses)
    opened = open_folder(find_model(on_disk(model)))
    device = choose_device(device)
    loaded, plain_decoder = _load(opened, device, paths, without, early_exit)
    tokenizer, config, texts = opened.tokenizer, loaded.config, [Continuation(prompt) for prompt in prompts]
    _warn_of_long_prompts(opened, encode_prompts(tokenizer, prompts, pauses))
    result = Generation(str(opened.folder), device, texts=texts)
    if isinstance(opened, OpenModel):
        result.paths, result.without = config.paths, config.without or None
    if top_next:
        for text, tokens in zip(result.texts, next_tokens(loaded, tokenizer, prompts, top_next, pauses), strict=True):
            text.next = tokens
    start = time.perf_counter()
    decoders: list[TokenDecoder] = []

    def make_decoder(*arguments: Any) -> TokenDecoder:
        decoders.append(plain_decoder(*arguments))
        return decoders[-1]

    for piece in continue_text(loaded, tokenizer, prompts, max_tokens, sampling, pauses, make_decoder):
        text = result.texts[piece.prompt]
        text.text += piece.text
        text.tokens, text.stopped = piece.tokens, piece.stopped or ""
        if on_text is not None and piece.text:
            on_text(piece.prompt, piece.text)
    result.seconds = time.perf_counter() - start
    result.mean_layer, result.accepted = decoders[0].mean_layer, decoders[0].accepted_share
    return result


def prompt_study(
    models: StrPath | Sequence[StrPath],
    prompts: str | Path | Sequence[str | Prompt],
    max_tokens: int = 40,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    greedy: bool = False,
    top_next: int = 3,
    pauses: int = 0,
    paths: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
    exit_layer: int | None = None,
    exit_confidence: float | None = None,
    speculate: int | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    on_model: Callable[[str], None] | None = None,
) -> PromptStudy:
    """Continue the same prompts (a file, or texts) with several models, one loaded after another.

    `out` is a report to write: .md, .html or .csv. `on_model(name)` is called before each model is loaded.
    """
    early_exit = EarlyExit(exit_layer, exit_confidence, speculate)
    sampling = _sampling(max_tokens, temperature, top_k, top_p, seed, greedy, top_next, pauses)
    if out is not None:
        check_file(out)
    if isinstance(prompts, (str, Path)):
        loaded = read_prompts(prompts)
    else:
        loaded = [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    if not models:
        raise BraidError("there is no model", todo="Name one or more model folders, runs or studies.")
    named, texts = name_sources(models), [prompt.text for prompt in loaded]
    for model in named.values():
        _check_model(open_folder(model_folder(model)), texts, pauses, paths, without, early_exit)
    study = PromptStudy(loaded)
    for name, model in named.items():
        if on_model is not None:
            on_model(name)
        study.models[name] = generate(
            model,
            texts,
            max_tokens,
            sampling.temperature,
            top_k,
            top_p,
            seed,
            top_next=top_next,
            pauses=pauses,
            paths=paths,
            without=without,
            exit_layer=exit_layer,
            exit_confidence=exit_confidence,
            speculate=speculate,
            device=device,
        )
    if out is not None:
        write_file(study_report(study), out)
    return study


def _sampling(
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    greedy: bool,
    top_next: int,
    pauses: int,
) -> Sampling:
    """The options, checked."""
    decode(Length, max_tokens, "max_tokens")
    decode(CountOrZero, top_next, "top_next")
    decode(CountOrZero, pauses, "pauses")
    return Sampling(0.0 if greedy else temperature, top_k, top_p, seed)


def _load(
    opened: OpenModel | OpenDecoder,
    device: str,
    paths: Sequence[str] | None,
    without: Sequence[str] | None,
    early_exit: EarlyExit,
) -> tuple[Any, Callable[..., TokenDecoder]]:
    """The model in memory, and what makes a decoder for it."""
    if isinstance(opened, OpenDecoder):
        _check_switches(opened, paths, without, early_exit)
        return opened.load(device), decoder_for
    loaded = opened.load(device, paths, without)
    early_exit.prepare(loaded)
    return loaded, early_exit.decoder


def _check_switches(
    decoder: OpenDecoder, paths: Sequence[str] | None, without: Sequence[str] | None, early_exit: EarlyExit
) -> None:
    """Refuse what only Braid's models have."""
    for option, given, what in (
        ("--paths", paths is not None, "paths to choose from"),
        ("--without", bool(without), "named modules"),
        ("--exit-layer, --exit-confidence and --speculate", early_exit != EarlyExit(), "early exits"),
    ):
        if given:
            raise BraidError(f"only Braid's models have {what}", str(decoder.folder), f"Leave out {option}.")


def _check_model(
    model: OpenModel | OpenDecoder,
    prompts: Sequence[str],
    pauses: int,
    paths: Sequence[str] | None,
    without: Sequence[str] | None,
    early_exit: EarlyExit,
) -> None:
    """Find problems before any model is loaded."""
    if isinstance(model, OpenDecoder):
        _check_switches(model, paths, without, early_exit)
        limit = model.context
    else:
        model.check(paths, without)
        empty = model.info.model
        early_exit.check(empty)
        limit = empty.model.positions.limit
    encoded = encode_prompts(model.tokenizer, prompts, pauses)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if limit is not None and len(ids) >= limit:
            excerpt = f"{prompt[:40]}..." if len(prompt) > 40 else prompt
            raise BraidError(
                f"the prompt {excerpt!r} has {len(ids)} tokens, and the model's limit is {limit}", str(model.folder)
            )
    _warn_of_long_prompts(model, encoded)


def _warn_of_long_prompts(model: OpenModel | OpenDecoder, prompts: Sequence[Sequence[int]]) -> None:
    """A model without a limit reads on beyond its context, where it was not trained; with one, prompts are refused."""
    if isinstance(model, OpenDecoder) or model.info.model.model.positions.limit is not None:
        return
    context, longest = model.config.max_position_embeddings, max(map(len, prompts))
    if longest > context:
        console.warn(
            f"{model.folder}: a prompt has {longest} tokens, and the model's context is {context}: beyond it, what it "
            "writes is likely to be poor"
        )
