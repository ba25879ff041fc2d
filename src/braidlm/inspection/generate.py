"""`braid generate` as functions: continue prompts with the model of a folder, or with several, and report on them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidlm.core import console
from braidlm.core.decoding.decoder import Sampling, TokenDecoder
from braidlm.core.decoding.early_exits import EarlyExit
from braidlm.core.decoding.generation import (
    NextToken,
    Prompt,
    continue_text,
    decoder_for,
    encode_prompts,
    next_tokens,
    read_prompts,
)
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError
from braidlm.core.files import write_text
from braidlm.core.report.rendering import FORMATS, check_file
from braidlm.core.report.report import Report, Table, listed
from braidlm.model.config.ranges import CountOrZero, Length, Pauses
from braidlm.model.config.strict import decode
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.names import StrPath
from braidlm.opening.open import open_model, open_models
from braidlm.opening.opened_model import OpenedModel


@dataclass
class Continuation:
    prompt: str
    text: str = ""
    """The new text alone."""
    tokens: int = 0
    """How many tokens were generated, the end of text included."""
    stopped: str = ""
    """Why it stopped: `end` of text, `max_tokens`, or the model's `limit`."""
    next: list[NextToken] = field(default_factory=list)
    """The most probable tokens after the prompt, if requested."""


@dataclass
class Generation:
    """All continuations, and how long they took."""

    model: str
    device: str
    paths: list[str] | None = None
    """The active paths, if they were chosen."""
    without: list[str] | None = None
    """The modules that are switched off, if any."""
    mean_layer: float | None = None
    """The layer that tokens were chosen after, on average, where they may leave early."""
    accepted: float | None = None
    """The share of drafted tokens that the whole model agreed with, where tokens were drafted."""
    seconds: float = 0.0
    """Without loading."""
    texts: list[Continuation] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(text.tokens for text in self.texts) / self.seconds if self.seconds else 0.0


@dataclass
class PromptStudy:
    """Prompts, and each model's continuations of them."""

    prompts: list[Prompt]
    models: dict[str, Generation] = field(default_factory=dict)
    """By the models' names; each has its texts in the order of the prompts."""

    def blocks(self) -> Iterator[tuple[Prompt, dict[str, Continuation]]]:
        """For each prompt, the continuation of each model."""
        for number, prompt in enumerate(self.prompts):
            yield prompt, {name: generation.texts[number] for name, generation in self.models.items()}


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
    `exit_confidence` and `speculate` are described by `EarlyExit`.
    """
    early_exit = EarlyExit(exit_layer, exit_confidence, speculate)
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    _check_counts(max_tokens, top_next, pauses)
    sampling = Sampling(0.0 if greedy else temperature, top_k, top_p, seed)
    opened = open_model(model, paths=paths, without=without)
    device = choose_device(device)
    result = Generation(str(opened.folder), device, texts=[Continuation(prompt) for prompt in prompts])
    make_plain: Callable[..., TokenDecoder] = decoder_for
    if not isinstance(opened, OpenedBraid):
        _check_no_exit(opened, early_exit)
    loaded: Any = opened.load(device)
    if isinstance(opened, OpenedBraid):
        early_exit.prepare(loaded)
        make_plain = early_exit.decoder
        result.paths, result.without = loaded.config.paths, loaded.config.without or None
    tokenizer = opened.tokenizer
    _warn_of_long_prompts(opened, encode_prompts(tokenizer, prompts, pauses))
    if top_next:
        for text, tokens in zip(result.texts, next_tokens(loaded, tokenizer, prompts, top_next, pauses), strict=True):
            text.next = tokens
    start = time.perf_counter()
    decoders: list[TokenDecoder] = []

    def make_decoder(*arguments: Any) -> TokenDecoder:
        decoders.append(make_plain(*arguments))
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
    exits = (exit_layer, exit_confidence, speculate)
    early_exit = EarlyExit(*exits)
    _check_counts(max_tokens, top_next, pauses)
    Sampling(0.0 if greedy else temperature, top_k, top_p, seed)  # refuses what is out of range
    sampled = (max_tokens, temperature, top_k, top_p, seed, greedy, top_next, pauses)
    if out is not None:
        check_file(out)
    read = read_prompts(prompts) if isinstance(prompts, (str, Path)) else prompts
    loaded = [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in read]
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
        write_text(out, FORMATS[Path(out).suffix](study_report(study)))
    return study


def _check_counts(max_tokens: int, top_next: int, pauses: int) -> None:
    decode(Length, max_tokens, "max_tokens")
    decode(CountOrZero, top_next, "top_next")
    decode(Pauses, pauses, "pauses")


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
            what = f"the prompt {excerpt!r} has {len(ids)} tokens, and the model's limit is {limit}"
            raise BraidError(what, str(model.folder))
    _warn_of_long_prompts(model, encoded)


def _warn_of_long_prompts(model: OpenedModel, prompts: Sequence[Sequence[int]]) -> None:
    """Say that a model without a limit reads beyond the context it was trained for; with a limit, it refuses to."""
    longest = max(map(len, prompts))
    if model.limit is None and model.context is not None and longest > model.context:
        console.warn(
            f"{model.folder}: a prompt has {longest} tokens, and the model's context is {model.context}: beyond it, "
            "what it writes is likely to be poor"
        )


def predictions(tokens: Sequence[NextToken]) -> str:
    """`girl 99.5%, boy 0.5%`."""
    return ", ".join(f"{_shown(token.text)} {_percent(token.probability)}" for token in tokens)


def next_rows(texts: Mapping[str, Continuation]) -> list[list[str | None]]:
    """The next tokens that any model predicts, the most probable first: their probability by each model, if known."""
    by_model = [{token.text: token.probability for token in text.next} for text in texts.values()]
    tokens = dict.fromkeys(token for known in by_model for token in known)
    ranked = sorted(tokens, key=lambda token: -max(known.get(token, 0.0) for known in by_model))
    cells = [[_percent(known[token]) if token in known else None for known in by_model] for token in ranked]
    return [[_shown(token), *row] for token, row in zip(ranked, cells, strict=True)]


def _shown(token: str) -> str:
    """A token as a word of a list; one that is invisible or ambiguous there is quoted."""
    word = token.strip()
    return repr(token) if not word or "," in word or not word.isprintable() else word


def _percent(probability: float) -> str:
    return f"{probability:.1%}" if probability >= 0.001 else "<0.1%"


def study_report(study: PromptStudy) -> Report:
    """A section for each prompt, with every model's continuation; for programs, a row for each prompt and model."""
    subtitle = f"The same prompts ({len(study.prompts)}), continued by {listed(list(study.models))}"
    report = Report("Prompt study", subtitle, tables=[_data_table(study)])
    report.verdict = (
        f"{listed(list(study.models))} continued the same {len(study.prompts)} prompts. Texts stand together, and no "
        "model has won: nothing here is scored, and one sample of each says little."
    )
    for number, (prompt, texts) in enumerate(study.blocks(), 1):
        words = " ".join((f"{prompt.name}: {prompt.text}" if prompt.name else prompt.text).split())
        report.heading(f"{number}. {words}" if len(words) <= 80 else f"{number}. {words[:77]}...")
        if prompt.domain:
            report.text(f"Domain: {prompt.domain}")
        for name, text in texts.items():
            note = f"next token predictions: {predictions(text.next)}" if text.next else ""
            report.quote(text.text, name, prompt=text.prompt, note=note)
        if len(texts) > 1 and (rows := next_rows(texts)):
            caption = "The probability that each model gives a token that any predicts."
            report.table(Table(["next token", *texts], rows, caption))
    return report


def _data_table(study: PromptStudy) -> Table:
    """Two columns for each of the most probable next tokens."""
    every = [(prompt, name, text) for prompt, texts in study.blocks() for name, text in texts.items()]
    columns = ["prompt", "domain", "model", "continuation", "tokens", "stopped"]
    ranks = range(1, 1 + max((len(text.next) for _, _, text in every), default=0))
    columns += [f"{what}_{rank}" for rank in ranks for what in ("next", "probability")]
    rows = []
    for prompt, name, text in every:
        following = [value for token in text.next for value in (token.text, f"{token.probability:.6f}")]
        row = [prompt.text, prompt.domain, name, text.text, text.tokens, text.stopped, *following]
        rows.append(row + [None] * (len(columns) - len(row)))
    return Table(columns, rows, name="study")
