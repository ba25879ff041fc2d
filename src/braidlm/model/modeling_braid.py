"""The model, the language model and the classifier that transformers' Auto classes load."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin

from .config.braid_config import BraidConfig
from .errors import BraidError
from .exporting import is_exporting
from .heads.ends import Head
from .heads.losses import IGNORED, next_token_loss, share_of_batch, shift_labels
from .language_model import Body, LanguageModel, shared_names
from .layer_skip import cache_slots, run_layers
from .pretrained import BraidCausalLMOutput, BraidModelOutput, BraidPreTrainedModel, BraidSequenceClassifierOutput
from .routing.dispatch import compute_dtype
from .routing.routing import Routings
from .served import asks_for_backend, describe, load_weights, prepare
from .span import (
    KeyValueCache,
    LayerRecord,
    Masks,
    Span,
    TextPass,
    TextReader,
    add_cache_layers,
    make_masks,
    mask_if_padded,
    positions_from_mask,
)


class BraidModel(BraidPreTrainedModel, Body):
    """Embedding, stages, norm: token ids in, hidden states out."""

    def __init__(self, config: BraidConfig):
        super().__init__(config)
        self.add_parts(config)
        self._tied_weights_keys = self.tied
        self.post_init()
        self.attention_layers: nn.ModuleList | None = None
        """The layers of another library's attention, once it is asked for."""
        describe(self)
        if asks_for_backend(config):
            prepare(self)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: KeyValueCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        reader: TextReader | None = None,
        **kwargs: Any,
    ) -> BraidModelOutput | tuple:
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cache = (DynamicCache() if past_key_values is None else past_key_values) if use_cache else None
        hidden_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        attentions = self.config.output_attentions if output_attentions is None else output_attentions
        for name, part in self.named_modules() if attentions else ():
            if hasattr(part, "cache_slot") and not getattr(part, "records_weights", False):
                what = f"{type(part).__name__} has no attention weights to show"
                raise BraidError(what, name, "Leave out output_attentions.")
        record = LayerRecord([] if hidden_states else None, [] if attentions else None)
        options = {"attention_mask": attention_mask, "position_ids": position_ids, "cache": cache, "record": record}
        done = self.run(input_ids, inputs_embeds, reader, passed_on=kwargs, **options)
        output = BraidModelOutput(
            last_hidden_state=done.hidden,
            past_key_values=cache,
            hidden_states=None if record.hidden_states is None else tuple(record.hidden_states),
            attentions=None if record.attentions is None else tuple(record.attentions),
            routings=done.routings or None,
            read=done.read or None,
        )
        return output if return_dict is not False else output.to_tuple()

    def run(
        self, tokens: Tensor | None, embedded: Tensor | None = None, reader: TextReader | None = None, **options: Any
    ) -> TextPass:
        """One pass over tokens [batch, time], or over embedded ones: the one place that puts a forward together.
        `options` are those of `span`; `reader` is a head that reads the text beside the stream."""
        embedded = self.embedding(tokens) if embedded is None else embedded
        span = self.span(embedded, tokens=tokens, **options)
        return TextPass(*self.stream(embedded, span)) if reader is None else reader.run(self.stream, embedded, span)

    def stream(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        """The normalised stream of embedded tokens, and what routers chose."""
        hidden, routings = run_layers(self.stages, self.enter(hidden, span), span, last=self.exit_layer)
        hidden = self.norm(hidden)
        if span.record is not None:
            span.record.end(hidden)
        return hidden, routings

    def enter(self, hidden: Tensor, span: Span) -> Tensor:
        """The stream before the first layer."""
        # Under autocast the stream itself has autocast's type: half the memory traffic, and trials showed no loss of
        # quality (docs/results.md); norms and losses still compute in float32.
        hidden = self.drop(self.positions.embed(hidden, span.positions)).to(compute_dtype(hidden))
        if span.record is not None:
            span.record.begin(hidden)
        return hidden

    def span(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
        record: LayerRecord | None = None,
        tokens: Tensor | None = None,
        masks: Masks | None = None,
        two_way: int = 0,
        passed_on: dict[str, Any] | None = None,
    ) -> Span:
        """Positions, masks and rotations for a pass over `hidden` [batch, time, width], embedded `tokens`. `masks`, by
        window, stand in place of those that follow from `attention_mask` and `cache`. Another library's attention gets
        what is `passed_on`, and knows by itself where the texts of a row without any of these begin."""
        time, device, dtype = hidden.shape[1], hidden.device, compute_dtype(hidden)
        if getattr(cache, "is_compileable", False):
            todo = "Leave out cache_implementation; `braid generate` has a fixed cache of its own."
            what = "Braid models do not support transformers' static caches: they show entries that are not filled yet"
            raise BraidError(what, todo=todo)
        if getattr(cache, "layers", None):
            # A head that reads the text keeps what it found behind the attentions, also of a pass that ends early.
            last = None if self.head_slots else self.exit_layer
            add_cache_layers(cache, len(self.cache_shapes) if last is None else cache_slots(self.stages, last))
        past = cache.get_seq_length() if cache is not None else 0
        padding = mask_if_padded(attention_mask)
        backend = None
        if asks_for_backend(self.config) and not (record is not None and record.attentions is not None):
            backend = passed_on or {}
            if self.attention_layers is None:
                prepare(self)
            if past == 0 and padding is None and masks is None:
                masks = dict.fromkeys(self.windows)
        if masks is None:  # a row with masks of its own may hold several texts
            self.check_length(past + time)
        if padding is not None and not is_exporting() and padding.shape[-1] == time and past:
            padding = nn.functional.pad(padding, (past, 0), value=1)
        if position_ids is None and padding is not None:
            position_ids = positions_from_mask(padding, time)
        elif position_ids is None:
            position_ids = torch.arange(past, past + time, device=device)[None]
        span = Span(
            positions=position_ids,
            masks=make_masks(self.windows, time, past, padding, device) if masks is None else masks,
            causal=masks is None and not is_exporting() and past == 0 and time > 1,
            two_way=two_way,
            cache=cache,
            rotations={size: self.positions.rotation(size, position_ids, dtype) for size in self.head_dims},
            real=None if padding is None else padding[:, -time:].bool(),
            record=record,
            tokens=tokens,
            backend=backend,
        )
        span.eager = span.needs_weights or self.config._attn_implementation == "eager"
        return span

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill the model as vLLM does, by the names in a folder's file; returns the names of what is filled."""
        return set(load_weights(self, weights))

    def check_length(self, length: int) -> None:
        """Refuse texts of more tokens than there are positions."""
        limit = self.positions.limit
        if limit is not None and not is_exporting() and length > limit:
            what = f"{length} tokens are more than the model's {limit} learned positions"
            raise BraidError(what, todo="Shorten the text, or train with a longer `context` or with `positions: rope`.")


class BraidForCausalLM(BraidPreTrainedModel, LanguageModel, GenerationMixin):
    """The language model."""

    def __init__(self, config: BraidConfig):
        super().__init__(config)
        self.model = BraidModel(config)
        self.add_head(config)
        self._tied_weights_keys = self.tied
        self.post_init()

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head if hasattr(self.head, "weight") else None  # earlier Transformers ties this to the embedding's

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: KeyValueCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> BraidCausalLMOutput | tuple:
        inputs = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
        outputs = self.model(*inputs, reader=self.reader, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        done = TextPass(outputs.last_hidden_state, outputs.routings or (), outputs.read or {}).at((slice(None), kept))
        logits = self.head(done.hidden, **done.read)
        loss = None
        if labels is not None:
            targets, count = shift_labels(labels), kwargs.get("num_items_in_batch")
            added = self.routing_loss_in_training(outputs.routings, outputs.last_hidden_state, attention_mask)
            if isinstance(self.head, Head):
                text = self.head.loss(done.hidden, targets, count, logits)
            else:  # peft's layer around a head has only its forward
                text = next_token_loss(logits, targets, count)
            loss = text + added * share_of_batch(targets != IGNORED, count)
        output = BraidCausalLMOutput(loss=loss, logits=logits, **_shared_outputs(outputs))
        return output if return_dict is not False else output.to_tuple()

    @property
    def reader(self) -> TextReader | None:
        """The head, if it reads the text beside the stream; most do not."""
        return self.head if self.model.head_slots else None

    def run(self, tokens: Tensor | None, embedded: Tensor | None = None, **options: Any) -> TextPass:
        """One pass over tokens [batch, time] up to the head; `options` are those of `BraidModel.span`."""
        return self.model.run(tokens, embedded, self.reader, **options)

    def text_loss(self, inputs: Tensor, targets: Tensor, count: Tensor | float | None = None) -> Tensor:
        """The loss of targets, each at the position that predicts it, without the routing losses."""
        done = self.run(inputs)
        return self.head.loss(done.hidden, targets, count, **done.read)


class BraidForSequenceClassification(BraidPreTrainedModel):
    """A classifier that reads the last real token of a text, whichever side is padded."""

    def __init__(self, config: BraidConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = BraidModel(config)
        self.score = nn.Linear(self.model.width_out, config.num_labels, bias=False)
        self._tied_weights_keys = self.tied = shared_names(self)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: KeyValueCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BraidSequenceClassifierOutput | tuple:
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = (input_ids != self.config.pad_token_id).long()
        outputs = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, **kwargs)
        hidden = outputs.last_hidden_state
        time = torch.arange(hidden.shape[1], device=hidden.device)
        real = torch.ones_like(hidden[..., 0]) if attention_mask is None else attention_mask
        last = (time * real.bool()).argmax(-1)
        logits = self.score(hidden[torch.arange(hidden.shape[0], device=hidden.device), last])
        loss = None
        if labels is not None:
            kind = self.config.problem_type
            if kind == "regression" or (kind is None and self.num_labels == 1):
                loss = nn.functional.mse_loss(logits.float(), labels.float().view_as(logits))
            elif kind == "multi_label_classification" or (kind is None and labels.is_floating_point()):
                loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels.float())
            else:
                loss = nn.functional.cross_entropy(logits.float(), labels.view(-1))
            loss = loss + self.routing_loss_in_training(outputs.routings, hidden, attention_mask)
        output = BraidSequenceClassifierOutput(loss=loss, logits=logits, **_shared_outputs(outputs))
        return output if return_dict is not False else output.to_tuple()


def _shared_outputs(outputs: BraidModelOutput) -> dict[str, Any]:
    """The fields that all three outputs share."""
    return {name: getattr(outputs, name) for name in ("past_key_values", "hidden_states", "attentions", "routings")}
