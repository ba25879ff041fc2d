"""Decoders of transformers as members of one model: each predicts the next token by itself, and what the model gives
are the logarithms of their averaged probabilities, as of the heads in `paths/average.py`.

A folder of members carries this file alone, under the name modeling_members.py.
"""

import functools
from collections.abc import Container
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .errors import BraidError, did_you_mean
from .heads.losses import best_alone

BASE = "base"
"""The decoder that members share which are LoRA adapters."""


class MembersConfig(PretrainedConfig):
    """Which decoders there are, and which members they make."""

    model_type = "braid_members"

    def __init__(
        self,
        decoders: dict[str, dict[str, Any]] | None = None,
        members: list[dict[str, Any]] | None = None,
        judged: bool = False,
        window: int | None = None,
        settle: int | None = None,
        paths: list[str] | None = None,
        **kwargs: Any,
    ):
        self.decoders = decoders or {}
        """The config.json of each decoder by its name."""
        self.members = members or []
        """Of each member `name`, `decoder`, and `share`, its part of the average before it is judged; `lora` has the
        rank and the scale of its adapters by matrix, where it shares the decoder with others."""
        self.judged, self.window, self.settle = judged, window, settle
        """Whether shares follow the text, how many tokens back members are judged by, None for all, and after how many
        tokens of a text the best goes on alone; all are computed still."""
        self.paths = paths
        """The active members; None for all. `from_pretrained(folder, paths=["stories"])` sets it."""
        configs = [self.decoder_config(name) for name in self.decoders]
        self.vocab_size = max((config.vocab_size for config in configs), default=0)
        contexts = (getattr(config, "max_position_embeddings", None) for config in configs)
        self.max_position_embeddings = min((each for each in contexts if each), default=None)
        for derived in ("vocab_size", "max_position_embeddings", "tie_word_embeddings"):
            kwargs.pop(derived, None)
        self.use_cache = kwargs.pop("use_cache", True)
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):  # transformers expects these
            setattr(self, name, kwargs.pop(name, None))
        super().__init__(tie_word_embeddings=False, **kwargs)  # each decoder's own says what it ties

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the members."""
        return tuple(member["name"] for member in self.members)

    def decoder_config(self, name: str) -> PretrainedConfig:
        """The configuration of a decoder, in transformers' own class."""
        options = dict(self.decoders[name])
        return AutoConfig.for_model(options.pop("model_type"), **options)


class Adapter(nn.Module):
    """What LoRA adds to the output of a matrix."""

    def __init__(self, matrix: nn.Module, rank: int, scale: float):
        super().__init__()
        weight: Any = matrix.weight
        # GPT-2's matrices are [in, out].
        outputs, inputs = weight.shape if isinstance(matrix, nn.Linear) else weight.shape[::-1]
        place = {"device": weight.device, "dtype": weight.dtype}
        self.down, self.up = nn.Linear(inputs, rank, bias=False, **place), nn.Linear(rank, outputs, bias=False, **place)
        self.scale = scale

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(self.down(hidden)) * self.scale  # type: ignore[no-any-return]


class AdaptedMatrix(nn.Module):
    """Mixed into the class of a matrix that members share: with what the adapter of the member that runs adds."""

    adapters: nn.ModuleDict
    member = ""  # the one that runs

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = super().forward(hidden)  # type: ignore[misc]
        return output + self.adapters[self.member](hidden) if self.member in self.adapters else output


@functools.cache
def adapted_class(plain: type[nn.Module]) -> type[AdaptedMatrix]:
    """A matrix's class with adapters; it keeps the name."""
    return type(plain.__name__, (AdaptedMatrix, plain), {"__module__": plain.__module__})  # type: ignore[return-value]


def adapted(decoder: nn.Module, address: str) -> AdaptedMatrix:
    """The matrix of a decoder, made one that may have adapters: its own parameters keep their names."""
    matrix = decoder.get_submodule(address)
    if not isinstance(matrix, AdaptedMatrix):
        made = object.__new__(adapted_class(type(matrix)))  # type: ignore[arg-type]
        made.__dict__ = matrix.__dict__ | {"_modules": {**matrix._modules, "adapters": nn.ModuleDict()}}
        owner, _, own = address.rpartition(".")
        setattr(decoder.get_submodule(owner), own, made)
        return made
    return matrix


class MembersCache(DynamicCache):
    """What each member keeps of the text, and what the text has said of the members."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.of: dict[str, Any] = {}
        """Each member's own cache."""
        self.last: dict[str, Tensor] = {}
        """Each member's log-probabilities [batch, vocabulary] of the token after the last."""
        self.said: Tensor | None = None
        """[batch, time, member]: by how much less probable than the best each found each token, in logarithms."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was, which beam search asks for."""
        for cache in self.of.values():
            cache.reorder_cache(beam_idx)
        self.last = {name: last[beam_idx.to(last.device)] for name, last in self.last.items()}
        self.said = None if self.said is None else self.said[beam_idx.to(self.said.device)]

    def crop(self, max_length: int) -> None:
        what = "the cache of members cannot forget its last tokens, which drafts of another model need"
        raise BraidError(what, todo="Generate without assistant_model and prompt_lookup_num_tokens.")


class MembersForCausalLM(PreTrainedModel, GenerationMixin):
    """Several decoders, and the average of their probabilities."""

    config_class = MembersConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _skip_keys_device_placement = ["past_key_values"]

    def __init__(self, config: MembersConfig):
        super().__init__(config)
        made = {name: AutoModelForCausalLM.from_config(config.decoder_config(name)) for name in config.decoders}
        self.decoders = nn.ModuleDict(made)
        self._no_split_modules = sorted({kind for one in made.values() for kind in one._no_split_modules or ()})
        self.takes = {name: set(signature(one.forward).parameters) for name, one in made.items()}
        self.names = config.names
        self.members = {member["name"]: member for member in config.members}
        for name in config.paths or ():
            if name not in self.names:
                raise BraidError(f"the model has no path '{name}'.{did_you_mean(name, self.names)}")
        self.use_paths(self.names if config.paths is None else config.paths)
        self.add_adapters()
        self.post_init()

    def add_adapters(self) -> None:
        """Give the decoders the adapters of their members, where they do not have them."""
        for name, member in self.members.items():
            for address, options in (member.get("lora") or {}).items():
                matrix = adapted(self.decoders[member["decoder"]], address)
                if name not in matrix.adapters:
                    matrix.adapters[name] = Adapter(matrix, **options)
        self.adapted = [module for module in self.modules() if isinstance(module, AdaptedMatrix)]
        # What is computed again for gradients would be so with the adapters of the member that ran last.
        self.supports_gradient_checkpointing = not self.adapted

    def use_paths(self, active: Container[str]) -> None:
        """Let these members be active alone: the probabilities of the others count nothing, and are not computed."""
        self.active = [name for name in self.names if name in active]

    def path_routers(self) -> tuple[()]:
        """No router chooses among the members."""
        return ()

    def get_input_embeddings(self) -> nn.Module:
        return next(iter(self.decoders.values())).get_input_embeddings()  # type: ignore[no-any-return, operator]

    def get_output_embeddings(self) -> None:
        """No one matrix gives the probabilities."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """What the decoders tie; transformers would look at direct children alone."""
        tied = {f"decoders.{name}.": one.get_expanded_tied_weights_keys() for name, one in self.decoders.items()}  # type: ignore[operator]
        return {begin + own: begin + other for begin, pairs in tied.items() for own, other in pairs.items()}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: `forward` makes the cache, of what each member makes for itself."""
        return False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MembersCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """As of any decoder of transformers. `hidden_states` are the last ones of all members, side by side."""
        if input_ids is None:
            raise BraidError("members read token ids: each has an embedding of its own", todo="Give input_ids.")
        cache = self._cache(past_key_values, self.config.use_cache if use_cache is None else use_cache)
        inputs = self._inputs(input_ids, attention_mask, position_ids)
        if not self.config.judged:  # who is judged is asked for the probabilities of the whole text
            inputs["logits_to_keep"] = logits_to_keep
        each, states = {}, []
        for name in self.active:
            output = self._run(name, inputs, cache, bool(output_hidden_states))
            each[name] = self._log_probabilities(output.logits)
            if output_hidden_states:
                states.append(output.hidden_states[-1])
        weights = self.log_weights(each, input_ids, attention_mask, cache)
        if cache is not None:
            cache.length += input_ids.shape[1]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        parts = []
        for logs, weight in zip(each.values(), weights.unbind(-1), strict=True):
            whole = logs.shape[1] == input_ids.shape[1]  # not yet cut by the member itself
            parts.append((logs[:, kept] if whole else logs) + (weight[:, kept, None] if weight.ndim else weight))
        logits = functools.reduce(torch.logaddexp, parts)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        hidden = (torch.cat(states, -1),) if states else None
        done = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=hidden)
        return done.to_tuple() if return_dict is False else done

    def log_shares(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """What `log_weights` gives for a text: [member], or [batch, time, member] where the text judges them."""
        inputs = self._inputs(input_ids, attention_mask)
        each = {name: self._log_probabilities(self._run(name, inputs, None, False).logits) for name in self.active}
        return self.log_weights(each, input_ids, attention_mask, None)

    def log_weights(
        self, each: dict[str, Tensor], ids: Tensor, mask: Tensor | None, cache: MembersCache | None
    ) -> Tensor:
        """The logarithm of each active member's share of the average, [member] or [batch, time, member]."""
        one = next(iter(each.values()))
        shares = [self.members[name]["share"] for name in each]
        weights = torch.tensor(shares, dtype=one.dtype, device=one.device).log()
        if self.config.judged:
            weights = weights + self._evidence(each, ids, mask, cache)
        return weights.log_softmax(-1)

    def _evidence(
        self, each: dict[str, Tensor], ids: Tensor, mask: Tensor | None, cache: MembersCache | None
    ) -> Tensor:
        """[batch, time, member]: what the text up to each token has said of the members. Every token with one before
        it says how probable each member found it; only the differences count, and long sums would lose them."""
        before, window = None if cache is None else cache.said, self.config.window
        past, time = 0 if before is None else before.shape[1], ids.shape[1]
        said = torch.stack([self._said(logs, ids, cache, name) for name, logs in each.items()], -1)
        said = said - said.amax(-1, keepdim=True)
        if mask is not None:
            if mask.ndim != 2:
                raise BraidError("a posterior judges its members by one text in each row, and this mask has others")
            real = mask.bool()
            there = real & F.pad(real, (1, 0))[:, :-1]
            said = torch.where(there[:, past : past + time, None], said, 0.0)
        said = said if before is None else torch.cat((before, said), 1)
        if self.config.settle is not None:
            count = torch.ones_like(said[..., 0]).cumsum(1) if mask is None else mask.cumsum(-1)[:, : said.shape[1]]
            heard = torch.where(count[..., None] <= self.config.settle, said, 0.0).cumsum(1)
            heard = torch.where(count[..., None] >= self.config.settle, best_alone(heard), heard)[:, past:]
        if cache is not None:
            cache.said = said
            cache.last = {name: logs[:, -1] for name, logs in each.items()}
        if self.config.settle is not None:
            return heard
        if window is None:
            return said.cumsum(1)[:, past:]
        return F.pad(said, (0, 0, window - 1, 0)).unfold(1, window, 1).sum(-1)[:, past:]

    @staticmethod
    def _said(logs: Tensor, ids: Tensor, cache: MembersCache | None, name: str) -> Tensor:
        """[batch, time]: the log-probability of each token after those before it; 0 of one that none is before."""
        if cache is not None and name in cache.last:
            logs = torch.cat((cache.last[name][:, None], logs[:, :-1]), 1)
            return logs.gather(-1, ids[..., None])[..., 0]
        return F.pad(logs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0], (1, 0))

    @staticmethod
    def _inputs(ids: Tensor, mask: Tensor | None, positions: Tensor | None = None) -> dict[str, Any]:
        """What every member reads: positions are counted from the mask where nobody gives them."""
        if mask is not None and mask.ndim == 2 and positions is None:
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}

    def _run(self, name: str, inputs: dict[str, Any], cache: MembersCache | None, with_states: bool) -> Any:
        """What a member's decoder gives."""
        decoder = self.members[name]["decoder"]
        given = {key: value for key, value in inputs.items() if value is not None and key in self.takes[decoder]}
        if cache is not None and name in cache.of:
            given["past_key_values"] = cache.of[name]
        options = {"use_cache": cache is not None, "output_hidden_states": with_states, "return_dict": True}
        for matrix in self.adapted:
            matrix.member = name
        output = self.decoders[decoder](**given, **options)
        if cache is not None:
            cache.of[name] = output.past_key_values
        return output

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        """In float32 or wider. A decoder that has no row for a token gives it no probability."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        return F.pad(wide, (0, self.config.vocab_size - wide.shape[-1]), value=torch.finfo(wide.dtype).min)

    @staticmethod
    def _cache(given: Any, use_cache: bool) -> MembersCache | None:
        if not use_cache:
            return None
        if given is None:
            return MembersCache()
        if not isinstance(given, MembersCache):
            what = f"members have a cache of their own kind, and this is a {type(given).__name__}"
            raise BraidError(what, todo="Begin without one: the output has it as past_key_values.")
        return given
