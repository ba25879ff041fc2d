"""What `/braid/` is asked and answers, as types: the OpenAPI page says all of it."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from braidlm.inspection.lineage import Node
from braidlm.inspection.one_text import LayerRouting
from braidlm.serving.api.bodies import Body, Name, SwitchesBody

MAX_CHARACTERS = 200_000
"""The longest text, before it is cut into tokens."""
MAX_TOKENS = 4096
"""Tokens of a text that is looked at, unless the model's limit is less."""
MAX_TOP = 1000

ModelName = Annotated[Name, Field(description="One of the names that `/braid/models` lists.")]
Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]


class TokensBody(Body):
    """A text to cut into tokens."""

    model: ModelName
    text: Text


class NextBody(Body):
    """A text to predict the next token of."""

    model: ModelName
    prompt: Text = Field("", description="The text; an empty one is the beginning of a text.")
    tokens: list[Annotated[int, Field(ge=0)]] = Field(
        [], max_length=MAX_TOKENS, description="Ids of tokens after the prompt, such as those generated so far."
    )
    top: int = Field(10, ge=1, le=MAX_TOP, description="How many of the most probable tokens.")
    switches: SwitchesBody = SwitchesBody()


class RoutingsBody(Body):
    """A text to follow through the model."""

    model: ModelName
    text: Text
    switches: SwitchesBody = SwitchesBody()


class ChangesBody(Body):
    """A text to predict twice: by `model` under `against`, and by `other` or else `model` under `switches`."""

    model: ModelName
    text: Text
    switches: SwitchesBody = Field(SwitchesBody(), description="Which parts are active after the change.")
    against: SwitchesBody = Field(
        SwitchesBody(), description="Which parts are active before it; by default those that the model's folder says."
    )
    other: ModelName | None = Field(None, description="Another model of the same tokenizer, in place of `model`.")


class Modules(BaseModel):
    """The experts of one layer, by the names that switch them off."""

    layer: str = Field(description='The address of the router: `without: ["LAYER:NAME"]` switches one off there.')
    label: str = Field(description="`layer 3 feed`, counted over the whole model.")
    names: list[str]


class ModelAnswer(BaseModel):
    """A served model; what its folder does not tell is null."""

    name: str
    kind: str | None = Field(None, description="The architecture that config.json names: braid, llama.")
    loaded: bool = Field(description="Whether its weights are in memory; they are loaded at the first request.")
    chat: bool = Field(False, description="Whether its tokenizer has a chat template.")
    context: int | None = Field(None, description="How many tokens the model is made for.")
    limit: int | None = Field(None, description="How many tokens it can read at most.")
    vocab_size: int | None = None
    tokenizer: str | None = Field(None, description="Its fingerprint: models of one tokenizer can be compared.")
    parameters: int | None = None
    paths: list[str] = Field([], description="Names of its paths.")
    modules: list[Modules] = Field([], description="Its experts, layer by layer.")
    gates: list[str] = Field([], description="Names of its gates.")
    members: list[str] = Field([], description="Names of the members, if it is an average or a posterior.")
    run: str | None = Field(None, description="The id of the run that it is the newest checkpoint of.")
    problem: str | None = Field(None, description="Why the model cannot be opened now.")


class ModelsAnswer(BaseModel):
    models: list[ModelAnswer]


class LineageEdge(BaseModel):
    """What went into what."""

    source: str = Field(serialization_alias="from", description="The id of a node.")
    target: str = Field(serialization_alias="to")
    label: str


class LineageAnswer(BaseModel):
    """A graph whose first node is the model itself."""

    nodes: list[Node]
    edges: list[LineageEdge]


class Token(BaseModel):
    id: int
    text: str = Field(description="What the token adds to the text; nothing where it completes no character.")


class TokensAnswer(BaseModel):
    tokens: list[Token]


class ProbableToken(BaseModel):
    id: int
    text: str = Field(description="The token alone.")
    probability: float = Field(description="The model's own, at temperature 1.")


class NextAnswer(BaseModel):
    tokens: list[ProbableToken] = Field(description="The most probable first.")


class RoutingsAnswer(BaseModel):
    tokens: list[Token]
    layers: list[LayerRouting]


class ChangedToken(Token):
    """One token of the text; null where nothing precedes the token that could predict it."""

    before: float | None = Field(description="Its probability.")
    after: float | None
    rank_before: int | None = Field(description="1 where no token was more probable.")
    rank_after: int | None
    divergence: float | None = Field(
        description="Of the two distributions that predict it: Jensen-Shannon, in bits, 0 to 1."
    )


class ChangesAnswer(BaseModel):
    tokens: list[ChangedToken]
    bits_before: float | None = Field(description="Bits per byte of the text.")
    bits_after: float | None


class RunAnswer(BaseModel):
    """A run in one of the served folders."""

    id: str
    name: str = Field(description="Where it is, from the folder that was named.")
    state: Literal["training", "done", "interrupted", "waiting"]
    budget: str | None = Field(description="How much its recipe trains.")
    step: int | None
    loss: float | None = Field(description="The newest of training.")
    bits_per_byte: float | None = Field(description="The newest of validation.")
    tokens: int | None
    tokens_per_second: float | None
    changed: float = Field(description="When something was last recorded, in seconds since 1970.")
    model: str | None = Field(description="The name under which its newest checkpoint is served.")


class ReportAnswer(BaseModel):
    """A page that a verb wrote into one of the served folders."""

    id: str
    title: str
    about: str = Field(description="Its verdict.")
    name: str = Field(description="Where it is, from the folder that was named.")
    url: str
    changed: float


class RunsAnswer(BaseModel):
    runs: list[RunAnswer]
    reports: list[ReportAnswer]


class MetricsAnswer(BaseModel):
    """New records of a run. A record is a row; columns may be added from one answer to the next."""

    columns: list[str] = Field(
        description="`step`, `kind` (train or validation), then e.g. `loss`, `bits_per_byte`, `bits_per_byte/TEXT`, "
        "`entropy/ROUTER` and `lowest/ROUTER` (routing health: 1 is an even use, 0 a choice that is never taken)."
    )
    rows: list[list[float | int | str | None]]
    next: str = Field(description="Give it as `after` to get the rows after these.")
    reset: bool = Field(description="The run went on from an earlier checkpoint: forget the rows before these.")
    more: bool = Field(description="There are further rows already.")
    state: Literal["training", "done", "interrupted", "waiting"]
    done: bool


class Sample(BaseModel):
    step: int
    prompt: str
    text: str


class SamplesAnswer(BaseModel):
    samples: list[Sample] = Field(description="What the model wrote during training, the newest last.")
