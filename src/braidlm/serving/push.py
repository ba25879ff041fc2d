"""`braid push` as a function: a model folder to the Hub, with a card that says what it is, in one commit."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.models import card as cards
from braidlm.core.models.integrity import check_finite
from braidlm.core.reading import given_path, read_json
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.names import StrPath
from braidlm.opening.open import open_model
from braidlm.opening.opened_model import OpenedModel

PUSHED = (
    *("config.json", "generation_config.json", "gate_config.json", "adapter_config.json", "lineage.json"),
    *("*.safetensors", "*.safetensors.index.json", "modeling_*.py", "configuration_*.py", "tokenization_*.py"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    *("chat_template*", "LICENSE*", "LICENCE*", "NOTICE*"),
)
"""What belongs to a model; whatever else lies in its folder stays here."""
RESULTS = "results.json"
PLACES = ("evaluation", ".")
"""Where results are looked for, in the working folder and in the model's, unless a file is named."""
LOG_IN = (
    "Log in with `hf auth login`, or set HF_TOKEN to a token of https://huggingface.co/settings/tokens that may write."
)


@dataclass
class Push:
    """What was pushed, or would be."""

    name: str
    """ORG/NAME on the Hub; without ORG, that of the token's owner."""
    folder: str
    private: bool | None
    """Whether a new repository is private; None leaves one that exists as it is."""
    revision: str
    message: str
    files: dict[str, int]
    """Bytes by name."""
    left_out: list[str]
    """What lies in the folder and is not part of a model."""
    card: str
    """README.md as it is pushed."""
    results: str | None = None
    """The file that the card's evaluation results are from."""
    notes: list[str] = field(default_factory=list)
    url: str | None = None
    commit: str | None = None

    def lines(self) -> list[str]:
        """The plan, for people."""
        total = sum(self.files.values())
        visible = {True: "private", False: "public", None: "private if it is new"}[self.private]
        told = self.card.split("\n---\n", 1)[0].splitlines()[1:]
        return [
            f"{self.folder} -> {self.name} ({visible}), revision {self.revision}: {self.message}",
            *(f"  {name:<28} {size:>13,} bytes" for name, size in self.files.items()),
            f"  {len(self.files)} files, {total:,} bytes",
            *([f"left out: {', '.join(self.left_out)}"] if self.left_out else []),
            "the card tells the Hub:",
            *(f"  {line}" for line in told),
            *self.notes,
        ]


def push(
    model: StrPath,
    name: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    results: StrPath | None = None,
    licence: str | None = None,
    language: Sequence[str] | None = None,
    tags: Sequence[str] | None = None,
    dry_run: bool = False,
) -> Push:
    """Push a model, named by its folder, its run or its study as STUDY/NAME, to NAME or ORG/NAME on the Hub.

    A new repository is private unless `private` is False; one that exists stays as visible as it is unless `private`
    is given. `revision` is a branch, which is made where there is none. `results` is what `braid eval` wrote
    (`results.json` or its folder); without it, results of exactly this model are looked for in `evaluation/`.
    `licence`, `language` and `tags` go to the card. With `dry_run` nothing is sent.
    """
    _check_name(name)
    if not dry_run and get_token() is None:
        raise BraidError("you are not logged in to the Hub", name, LOG_IN)
    opened = open_model(model)
    _check(opened)
    folder = opened.folder
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    chosen = [path for path in inside if path.is_file() and any(fnmatch(path.name, one) for one in PUSHED)]
    left_out = [path.name for path in inside if path not in chosen and path.name != cards.CARD]
    stated = _licence(opened, licence)
    found, evaluated = _results(opened, results)
    card = _card(opened, name.split("/")[-1], stated, evaluated, language or [], tags or [])
    notes = [] if stated else [f"licence: {cards.NO_LICENCE} `--licence mit` states it for the card."]
    notes += [] if found is None else [f"evaluation results: {found}"]
    files = {path.name: path.stat().st_size for path in chosen} | {cards.CARD: len(card.encode())}
    message = message or f"{opened.title}, pushed with Braid"
    plan = Push(name, str(folder), private, revision or "main", message, files, left_out, card, found, notes)
    for line in plan.lines():
        (console.show if dry_run else console.say)(line)
    if not dry_run:
        _send(plan, folder)
        console.show(f"pushed: {plan.url}")
    return plan


def _check_name(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        what = f"the Hub cannot have a model of this name ({str(error).split(':')[0]})"
        raise BraidError(what, ascii(name), "Give NAME or ORG/NAME, of letters, digits, '-', '_' and '.'.") from None


def _check(opened: OpenedModel) -> None:
    """Refuse what nobody could use: no tokenizer, weights that do not fit or are no numbers."""
    opened.check_with_tokenizer()
    if opened.base is not None and opened.base.hub is None:
        own = opened.base.folder
        what = f"these adapters are for a model in a folder of this machine ({own}), which others do not have"
        todo = "Push that model first, and write its name on the Hub in place of the folder into the adapters' config."
        raise BraidError(what, str(opened.folder), todo)
    if not (files := sorted(opened.folder.glob("*.safetensors"))):
        todo = "Load it with transformers and save it again, which writes model.safetensors."
        what = "this folder has no weights in safetensors, and Braid pushes no pickle"
        raise BraidError(what, str(opened.folder), todo)
    for path in files:
        check_finite(path)


def _card(
    opened: OpenedModel,
    title: str,
    licence: str | None,
    evaluated: tuple[Any, Any] | None,
    language: Sequence[str],
    tags: Sequence[str],
) -> str:
    """The folder's own card, or a new one where nobody has changed it, with what is stated now."""
    folder, lineage = opened.folder, opened.lineage
    told, text = cards.read_card(folder)
    if lineage is None:
        told = {"library_name": "transformers", "pipeline_tag": "text-generation"} | told
        text = text or f"# {title}\n"
    else:
        model: Any = opened.info.model if isinstance(opened, OpenedBraid) and not opened.is_bridged else None
        made = cards.model_card(folder.name, lineage, model)
        if not text or (folder / cards.CARD).read_text(encoding="utf-8") == made:
            named = lineage | ({"licence": licence} if licence else {})
            text = cards.FRONT_MATTER.sub("", cards.model_card(title, named, model), count=1)
        bases = {} if opened.base is None else {"base_model": [opened.base.hub]}
        told = cards.front_matter(lineage) | bases | {key: value for key, value in told.items() if value}
    if licence:
        told["license"] = licence
    own = told.get("tags") or []
    if all_tags := dict.fromkeys([*([own] if isinstance(own, str) else map(str, own)), *tags]):
        told["tags"] = list(all_tags)
    if language:
        told["language"] = list(language)
    if evaluated is not None:
        told["model-index"] = cards.model_index(title, *evaluated)
        text = f"{text.rstrip()}\n\n{cards.results_section(evaluated[0])}"
    return cards.written_card(told, text)


def _licence(opened: OpenedModel, given: str | None) -> str | None:
    """The licence for the card; where sources do not agree, somebody has to say which."""
    lineage = opened.lineage or {}
    stated = given or cards.licence_of_folder(opened.folder) or cards.licence_of(lineage)
    sources = cards.source_licences(lineage)
    if not stated and len({one for one in sources.values() if one}) > 1:
        listed = "; ".join(f"{name}: {licence or 'not stated'}" for name, licence in sources.items())
        todo = "Say under which it may be given to others: `--licence NAME`, such as apache-2.0."
        raise BraidError(f"what this model was made of has different licences ({listed})", str(opened.folder), todo)
    return stated


def _results(opened: OpenedModel, given: StrPath | None) -> tuple[str | None, tuple[Any, Any] | None]:
    """The file with evaluation results of exactly this model, and its results and tasks."""
    if given is not None:
        path = given_path(given)
        path = path / RESULTS if path.is_dir() else path
        if (found := _results_in(path, opened)) is None:
            todo = "Evaluate the model as it is now with `braid eval`, or leave out --results."
            what = "these are not results of this model (another SHA-256, or parts were off)"
            raise BraidError(what, str(path), todo)
        return str(path), found
    homes = (Path(), opened.folder, opened.folder.parent.parent)
    for path in (home / place / RESULTS for home in homes for place in PLACES):
        if path.is_file() and (found := _results_in(path, opened)) is not None:
            return str(path), found
    return None, None


def _results_in(path: Path, opened: OpenedModel) -> tuple[Any, Any] | None:
    facts = read_json(path)
    models, tasks = facts.get("models"), facts.get("tasks")
    for one in models if isinstance(models, list) and isinstance(tasks, dict) else ():
        is_whole = isinstance(one, dict) and one.get("paths") is None and one.get("without") is None
        if not is_whole or one.get("sha256") != opened.sha256 or not isinstance(one.get("tasks"), dict):
            continue
        if scored := {task: result for task, result in one["tasks"].items() if _is_score(result)}:
            return scored, tasks
    return None


def _is_score(result: Any) -> bool:
    score = result.get("score") if isinstance(result, dict) else None
    return isinstance(score, (int, float)) and math.isfinite(score)


def _send(plan: Push, folder: Path) -> None:
    """Create the repository where there is none, and commit all files at once."""
    token = get_token() or ""
    api = HfApi(token=token, library_name="braidlm")
    with _explained(plan.name, api.endpoint, token):
        id = plan.name if "/" in plan.name else f"{api.whoami()['name']}/{plan.name}"
        existed = api.repo_exists(id)
        repository = api.create_repo(id, private=plan.private is not False, exist_ok=True)
        if existed and plan.private is not None:
            api.update_repo_settings(id, private=plan.private)
        if plan.revision != "main":
            api.create_branch(id, branch=plan.revision, exist_ok=True)
        contents = {name: plan.card.encode() if name == cards.CARD else str(folder / name) for name in plan.files}
        operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
        info = api.create_commit(id, operations, commit_message=plan.message, revision=plan.revision)
    plan.name, plan.url, plan.commit = id, str(repository), info.oid


@contextmanager
def _explained(name: str, endpoint: str, token: str) -> Iterator[None]:
    """What the Hub refuses as an error that says what to do; whatever it answers, the token is not shown."""

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise BraidError("the Hub may not be reached (HF_HUB_OFFLINE is set)", name, "Unset HF_HUB_OFFLINE.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        said = (error.server_message or str(error).split("\n")[0]).replace(token, "...").strip()
        if status == 401:
            raise BraidError(f"the Hub does not accept your token ({said})", name, LOG_IN) from None
        if status == 403:
            todo = "Push to a name of your own or of an organisation that lets you write, with a token that may write."
            raise BraidError(f"your token may not write here ({said})", name, todo) from None
        raise BraidError(f"the Hub refuses this: {said}", name) from None
    except (ValueError, RuntimeError) as error:  # a card that the Hub does not take, a file that did not arrive
        said = " ".join(str(error).replace(token, "...").split())
        raise BraidError(f"the Hub refuses this: {said}", name) from None
    except (HTTPError, OSError) as error:
        said = (str(error).split("\n")[0] or type(error).__name__).replace(token, "...")
        raise BraidError(f"the Hub cannot be reached at {endpoint}: {said}", name, "Try again later.") from None
