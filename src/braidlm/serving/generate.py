"""`braid generate` as functions: continue prompts with the model of a folder, or with several side by side."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from braidlm.core import console
from braidlm.core.decoding.decoder import Sampling, TokenDecoder
from braidlm.core.decoding.early_exits import EarlyExit
from braidlm.core.decoding.generation import continue_text, decoder_for, encode_prompts, next_tokens
from braidlm.core.decoding.prompts import Prompt, read_prompts
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError
from braidlm.core.report.rendering import check_file, write_file
from braidlm.model.config.ranges import CountOrZero, Length
from braidlm.model.config.strict import decode
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.names import StrPath
from braidlm.opening.open import open_model, open_models
from braidlm.opening.opened_model import OpenedModel
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
    _check_counts(max_tokens, top_next, pauses)
    sampling = Sampling(0.0 if greedy else temperature, top_k, top_p, seed)
    opened = open_model(model, paths=paths, without=without)
    device = choose_device(device)
    result = Generation(str(opened.folder), device, texts=[Continuation(prompt) for prompt in prompts])
    plain_decoder: Callable[..., TokenDecoder] = decoder_for
    if not isinstance(opened, OpenedBraid):
        _check_no_exit(opened, early_exit)
    loaded: Any = opened.load(device)
    if isinstance(opened, OpenedBraid):
        early_exit.prepare(loaded)
        plain_decoder = early_exit.decoder
        result.paths, result.without = loaded.config.paths, loaded.config.without or None
    tokenizer = opened.tokenizer
    _warn_of_long_prompts(opened, encode_prompts(tokenizer, prompts, pauses))
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
    _check_counts(max_tokens, top_next, pauses)
    Sampling(0.0 if greedy else temperature, top_k, top_p, seed)  # refuses what is out of range
    sampled = (max_tokens, temperature, top_k, top_p, seed, greedy, top_next, pauses)
    exits = (exit_layer, exit_confidence, speculate)
    if out is not None:
        check_file(out)
    if isinstance(prompts, (str, Path)):
        loaded = read_prompts(prompts)
    else:
        loaded = [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    if not models:
        raise BraidError("there is no model", todo="Name one or more model folders, runs or studies.")
    opened, texts = open_models(models, paths=paths, without=without), [prompt.text for prompt in loaded]
    for model in opened:
        _check_model(model, texts, pauses, early_exit)
    study = PromptStudy(loaded)
    for model in opened:
        if on_model is not None:
            on_model(model.name)
        study.models[model.name] = generate(model.folder, texts, *sampled, paths, without, *exits, device)
    if out is not None:
        write_file(study_report(study), out)
    return study


def _check_counts(max_tokens: int, top_next: int, pauses: int) -> None:
    decode(Length, max_tokens, "max_tokens")
    decode(CountOrZero, top_next, "top_next")
    decode(CountOrZero, pauses, "pauses")


def _check_no_exit(model: OpenedModel, early_exit: EarlyExit) -> None:
    """Refuse what a decoder of transformers does not have."""
    model.check()
    if early_exit != EarlyExit():
        todo = "Leave out --exit-layer, --exit-confidence and --speculate."
        raise BraidError("only Braid's models have early exits", str(model.folder), todo)


def _check_model(model: OpenedModel, prompts: Sequence[str], pauses: int, early_exit: EarlyExit) -> None:
    """Find problems before any model is loaded."""
    if isinstance(model, OpenedBraid):
        model.check()
        early_exit.check(model.info.model)
    else:
        _check_no_exit(model, early_exit)
    encoded, limit = encode_prompts(model.tokenizer, prompts, pauses), model.limit
    for prompt, ids in zip(prompts, encoded, strict=True):
        if limit is not None and len(ids) >= limit:
            excerpt = f"{prompt[:40]}..." if len(prompt) > 40 else prompt
            raise BraidError(
                f"the prompt {excerpt!r} has {len(ids)} tokens, and the model's limit is {limit}", str(model.folder)
            )
    _warn_of_long_prompts(model, encoded)


def _warn_of_long_prompts(model: OpenedModel, prompts: Sequence[Sequence[int]]) -> None:
    """Say that a model without a limit reads beyond the context it was trained for; with a limit, it refuses to."""
    longest = max(map(len, prompts))
    if model.limit is None and model.context is not None and longest > model.context:
        console.warn(
            f"{model.folder}: a prompt has {longest} tokens, and the model's context is {model.context}: beyond it, "
            "what it writes is likely to be poor"
        )
