"""Heads that write a token byte by byte, each byte after those before it or all at once."""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import BraidError
from ...exporting import is_exporting
from ..ends import Embedding, Head, heads
from ..losses import IGNORED
from .embedding import ByteConfig, ByteEmbedding, ByteEnd, KeysValues, SymbolBlocks
from .spelling import END, NOTHING, SYMBOLS, Remembered

TOKENS_AT_ONCE = 8192  # so many have their symbols' log-probabilities in memory together in evaluation


class ByteHead(ByteEnd, Head):
    """The base class: the probability of a token is the product of those of its symbols and of its end.

    A linear layer makes a vector for each symbol of a piece from the stream. Those of a later piece do not depend on
    the stream but on the piece before it, whose symbols the transformer sees; so it is computed once for each token of
    the vocabulary and not for each position of a text.

    The logits are log-probabilities. They belong to all spellings, most of which are no tokens, so that those of the
    vocabulary add up to less than 1: a softmax over the logits, as in sampling, normalises them.
    """

    causal: ClassVar[bool]  # whether a symbol is predicted from those before it

    def __init__(self, config: ByteConfig, width: int, vocab_size: int):
        super().__init__(config, width, vocab_size)
        self.slots = nn.Linear(width, config.piece * config.width)
        self.blocks = SymbolBlocks(config, self.causal)
        self.symbols = nn.Embedding(SYMBOLS, config.width)
        self.end = nn.Linear(config.width, 1, bias=False)
        self.end.product_share = config.piece  # type: ignore[assignment]  # it is applied to every symbol
        self.scale_by_inputs()
        self.recalled: Remembered[Tensor] = Remembered()

    def shared_with(self, embedding: Embedding) -> dict[str, str]:
        if not isinstance(embedding, ByteEmbedding):
            return {}
        own, other = self.config.width, embedding.config.width
        if own != other:
            raise BraidError(f"tie_embeddings needs bytes of one width, and the head has {own}, the embedding {other}")
        return {"symbols.weight": "symbols.weight"}

    def score_flops(self, length: int) -> int:
        """FLOPs per token of the products with the symbols' vectors."""
        return 2 * self.config.piece * self.symbols.weight.numel()

    def slots_of(self, hidden: Tensor) -> Tensor:
        """[row, piece, width] from the stream [row, width]."""
        return self.slots(hidden).unflatten(-1, (self.config.piece, -1))

    def inputs(self, slots: Tensor, before: Tensor) -> Tensor:
        """What the transformer reads in place of symbols, each of which comes after one of `before`."""
        raise NotImplementedError("each kind of head predicts from other symbols")

    def all_symbols(self, hidden: Tensor) -> Tensor:
        """The log-probabilities [..., symbol] after the transformer [..., width], of the end as the last."""
        logits = torch.cat((F.linear(hidden, self.symbols.weight.to(hidden.dtype)), self.end(hidden)), -1)
        return F.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)

    def vectors_of(self, symbols: Tensor) -> Tensor:
        """The vector of each symbol, as large as a slot; that of the end and of nothing is 0."""
        return self.symbols(symbols.clamp(max=SYMBOLS - 1)) * self.config.width**0.5 * (symbols < SYMBOLS)[..., None]

    def spelled(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities [row, piece] of the symbols of each token's first piece, 0 where there is none."""
        symbols = self.spelling.first(tokens)
        before = F.pad(symbols[:, :-1], (1, 0), value=NOTHING)
        return self._chosen(self.blocks(self.inputs(self.slots_of(hidden), before)), symbols)

    def spelled_later(self, tokens: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """Log-probabilities [later piece, piece] of the symbols of later pieces, and the token [later piece] of each.
        None if there is no later piece; with `tokens`, it may be only those of these."""
        later = self.spelling.later(tokens)
        if later is None:
            return None
        size = self.config.piece
        slots = self.slots_of(self.symbols.weight.new_zeros(1, self.width))
        context = slots + self.vectors_of(later.symbols[:, :size])
        own = self.inputs(slots.expand(len(later.tokens), -1, -1), later.symbols[:, size - 1 : -1])
        hidden = self.blocks(torch.cat((context, own.to(context.dtype)), dim=1))
        return self._chosen(hidden[:, size:], later.symbols[:, size:]), later.tokens

    def _chosen(self, hidden: Tensor, symbols: Tensor) -> Tensor:
        found = self.all_symbols(hidden).gather(-1, symbols.clamp(max=END)[..., None])[..., 0]
        return found.masked_fill(symbols == NOTHING, 0.0)

    def later_pieces(self, tokens: Tensor | None = None) -> Tensor | None:
        """Log-probabilities [vocabulary] of all that follows a token's first piece; None if nothing does."""
        if not self.training and not torch.is_grad_enabled() and not is_exporting():
            # An empty tensor says that there is none.
            tensors = (*self.parameters(), *self.buffers())
            found = self.recalled.get(tensors, lambda: self._later_sums(None), torch.is_autocast_enabled())
        else:
            found = self._later_sums(tokens)
        return found if len(found) else None

    def _later_sums(self, tokens: Tensor | None) -> Tensor:
        later = self.spelled_later(tokens)
        if later is None:
            return self.symbols.weight.new_empty(0)
        found, owners = later
        return found.new_zeros(len(self.spelling.lengths)).index_add(0, owners, found.sum(-1))

    def token_log_probabilities(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """[row] of a token for each row of the stream [row, width]."""
        if torch.is_grad_enabled():
            found = self.spelled(hidden, tokens).sum(-1)
        else:
            pairs = zip(hidden.split(TOKENS_AT_ONCE), tokens.split(TOKENS_AT_ONCE), strict=True)
            found = torch.cat([self.spelled(*pair).sum(-1) for pair in pairs])
        later = self.later_pieces(tokens)
        return found if later is None else found + later[tokens]

    def log_probabilities(self, hidden: Tensor, rows: Tensor, tokens: Tensor, **read: Tensor) -> Tensor:
        return self.token_log_probabilities(hidden[rows], tokens)

    def scores(self, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        return logits[rows, tokens]

    def loss(
        self, hidden: Tensor, targets: Tensor, count: Tensor | float | None = None, logits: Tensor | None = None
    ) -> Tensor:
        """Only the targets' own symbols are computed, whether or not all logits are known."""
        real = targets.flatten() != IGNORED
        found = self.token_log_probabilities(hidden.flatten(0, -2), targets.flatten().clamp(min=0))
        return -(found * real).sum() / (real.sum() if count is None else count)

    def forward(self, hidden: Tensor) -> Tensor:
        """The log-probabilities [..., vocabulary] of the stream [..., width]."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        scores, later = self.vocabulary(rows), self.later_pieces()
        return (scores if later is None else scores + later).unflatten(0, hidden.shape[:-1])

    def vocabulary(self, hidden: Tensor) -> Tensor:
        """The log-probabilities [row, token] of all tokens' first pieces."""
        raise NotImplementedError("each kind of head computes them differently")

    def all_first_pieces(self) -> Tensor:
        """[token, piece] of the vocabulary."""
        lengths = self.spelling.lengths
        return self.spelling.first(torch.arange(len(lengths), device=lengths.device))


KEYS_AT_ONCE = 1 << 18
"""How many keys of one layer are in memory together, in rows of the stream; one row may need more."""


class Prefixes(NamedTuple):
    """The distinct first symbols, so many of them, of the tokens of a vocabulary."""

    parents: Tensor  # [prefix] which of the prefixes that are one symbol shorter it continues
    last: Tensor  # [prefix] its last symbol
    tokens: Tensor  # [token] the tokens that go on after a prefix of this length, be it with their end
    chosen: Tensor  # [token] where the next symbol of each is among those of all prefixes, [prefix x symbol]


@heads.register("bytes_autoregressive")
class AutoregressiveByteHead(ByteHead):
    """Every byte of the next token is predicted from the stream and from the bytes before it."""

    causal = True

    Config = ByteConfig

    def __init__(self, config: ByteConfig, width: int, vocab_size: int):
        super().__init__(config, width, vocab_size)
        self.tree: Remembered[list[Prefixes]] = Remembered()

    def inputs(self, slots: Tensor, before: Tensor) -> Tensor:
        return slots + self.vectors_of(before)

    def vocabulary(self, hidden: Tensor) -> Tensor:
        """Exact for every token: a prefix that several tokens share is computed once for all of them."""
        tree = self.tree.get((self.spelling.symbols, self.spelling.lengths), self._find_prefixes)
        keys = max(len(level.parents) * (depth + 1) for depth, level in enumerate(tree))
        if is_exporting():  # into how many parts the rows are divided would depend on their number
            return self._scores(hidden, tree)
        return torch.cat([self._scores(rows, tree) for rows in hidden.split(max(1, KEYS_AT_ONCE // keys))])

    def _find_prefixes(self) -> list[Prefixes]:
        """The prefixes of each length."""
        pieces = self.all_first_pieces()
        tokens = torch.arange(len(pieces), device=pieces.device)
        node = torch.zeros_like(tokens)
        levels: list[Prefixes] = []
        for position, symbols in enumerate(pieces.t()):
            if position:
                tokens = tokens[symbols[tokens] != NOTHING]
                if not len(tokens):
                    break
                keys, index = torch.unique(node[tokens] * SYMBOLS + pieces[tokens, position - 1], return_inverse=True)
                node = torch.zeros_like(node).index_copy(0, tokens, index)
            else:
                keys = tokens[:1]
            chosen = node[tokens] * (END + 1) + symbols[tokens]
            levels.append(Prefixes(keys // SYMBOLS, keys % SYMBOLS, tokens, chosen))
        return levels

    def _scores(self, hidden: Tensor, tree: list[Prefixes]) -> Tensor:
        slots, rows = self.slots_of(hidden), hidden.shape[0]
        wide = torch.promote_types(slots.dtype, torch.float32)
        scores = slots.new_zeros(rows, len(self.spelling.lengths), dtype=wide)
        past: list[KeysValues] = []
        for position, level in enumerate(tree):
            inputs = slots[:, position, None]
            if position:
                inputs = inputs + self.vectors_of(level.last)
                past = [_of_parents(keys_values, rows, level.parents) for keys_values in past]
            stepped, past = self.blocks.step(inputs.flatten(0, 1)[:, None], past)
            found = self.all_symbols(stepped[:, 0]).view(rows, -1)
            # onnxscript takes additions at all places for the values themselves, which those to zeros are.
            scores = scores + torch.zeros_like(scores).index_add(1, level.tokens, found[:, level.chosen])
        return scores


def _of_parents(keys_values: KeysValues, rows: int, parents: Tensor) -> KeysValues:
    """The keys and values of each prefix's parent, for each row of the stream."""
    key, value = (tensor.unflatten(0, (rows, -1))[:, parents].flatten(0, 1) for tensor in keys_values)
    return key, value


@heads.register("bytes_parallel")
class ParallelByteHead(ByteHead):
    """Every byte of the next token is predicted from the stream alone, independently of the others (STLM)."""

    causal = False

    Config = ByteConfig

    def inputs(self, slots: Tensor, before: Tensor) -> Tensor:
        return slots

    def vocabulary(self, hidden: Tensor) -> Tensor:
        found, pieces = self.all_symbols(self.blocks(self.slots_of(hidden))), self.all_first_pieces()
        scores = found.new_zeros(hidden.shape[0], len(pieces))
        for position, symbols in enumerate(pieces.t()):
            real = symbols != NOTHING
            scores = scores + found[:, position, symbols.where(real, 0)] * real
        return scores
