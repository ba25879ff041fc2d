"""What clients send: OpenAI's bodies with their bounds, and what Braid adds to them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from braidlm.core.decoding.decoder import Sampling
from braidlm.model.config.ranges import MAX_INTEGER
from braidlm.serving.engine import Switches

MOST_KEYS = 64
MOST_NAMES = 1024
"""Names in a list of paths or modules."""
MOST_STOPS, LONGEST_STOP = 16, 200
TOP_LOGPROBS = 20
"""As many of the most probable tokens as OpenAI gives at most."""

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, min_length=1)]
Name = Annotated[str, Field(max_length=1000)]
Names = Annotated[list[Name], Field(fail_fast=True, max_length=MOST_NAMES)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Nothing = Annotated[float, Field(ge=0, le=0)]
"""What Braid does not do, and may only be asked for as OpenAI's default says."""
TopLogprobs = Annotated[int, Field(ge=0, le=TOP_LOGPROBS)]


class Body(BaseModel):
    """A JSON object without unknown keys, whose values are not converted: "5" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MOST_KEYS:
            raise ValueError(f"an object may have at most {MOST_KEYS} keys")
        return data


class SwitchesBody(Body):
    """Which parts of the model are active, by name."""

    paths: Names | None = None
    """Only these paths; by default as the model's folder says."""
    without: Names = []
    """Modules (experts) that are switched off."""
    gates_off: Names = []
    """Gates that are switched off, as `/braid/models` names them."""
    members: Names | None = None
    """Members of an average or a posterior that stay active."""

    def switches(self) -> Switches:
        """The switches as the engine takes them."""
        paths, members = (None if names is None else tuple(names) for names in (self.paths, self.members))
        return Switches(paths, tuple(self.without), tuple(self.gates_off), members)


class StreamOptions(Body):
    """What a stream tells besides."""

    include_usage: bool = False
    """A last event with the numbers of tokens."""
    include_obfuscation: bool = False


class GenerationBody(Body):
    """What completions and chats have in common."""

    model: Name
    """One of the names that `/v1/models` lists."""
    temperature: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """0 takes the most probable token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] | None = None
    """Only the k most probable tokens; 0 and -1 are all."""
    seed: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None = None
    """The same seed gives the same text, whatever else runs."""
    n: Annotated[int, Field(ge=1)] = 1
    """How many choices for each prompt."""
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    """The text ends before any of these."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    """Go on after the token that ends a text."""
    return_token_ids: bool = False
    """Give the ids of the tokens of each choice, and of its prompt, as vLLM does."""
    braid: SwitchesBody = SwitchesBody()
    user: str | None = None
    """Ignored."""
    presence_penalty: Nothing | None = None
    frequency_penalty: Nothing | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def sends_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, choice: int) -> Sampling:
        """How the tokens of a choice are chosen: of several with one seed, each has its own."""
        top_k = self.top_k if self.top_k and self.top_k > 0 else None
        seed = None if self.seed is None else (self.seed + choice) % MAX_INTEGER
        return Sampling(self.temperature, top_k, None if self.top_p == 1.0 else self.top_p, seed)


class CompletionBody(GenerationBody):
    """A request to continue one or several prompts."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]
    ) = ""
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None = 16
    logprobs: TopLogprobs | None = None
    """Log-probabilities of the tokens, and of this many of the most probable ones."""
    echo: bool = False
    """The prompt before its continuation; with `logprobs` its log-probabilities too."""
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts, as texts or as token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class TextPart(Body):
    """Part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a chat."""

    role: Annotated[str, Field(max_length=100)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=1000)]
    name: Name | None = None

    def plain(self) -> dict[str, str]:
        """The message as chat templates read it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


class ChatBody(GenerationBody):
    """A request for the next message of a chat."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=1000)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    """By default as many as the model can read."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    logprobs: bool | None = False
    top_logprobs: TopLogprobs | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    store: Literal[False] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    """Ignored."""
