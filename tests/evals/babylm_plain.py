"""What the BabyLM pipeline of 2025 computes, from its definitions: a text at a time, with transformers' tokenizer."""

import math
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from braidlm.data.tokenizing.tokenizer import BraidTokenizer, SpecialTokens
from tests.tiny_models import randomised

TEXT = (
    "Box 0 contains the key and the hat, Box 1 contains the book. The cat sat on the mat and the dog ran home. "
    "Did you see her? Yes, I did. Nothing was there. Make a noun of blickable: blickability or blickableness. "
) * 3


def small_tokenizer(pieces: int = 320) -> BraidTokenizer:
    """A byte-level BPE as GPT-2's, small enough that words fall into several pieces."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=pieces, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    backend.train_from_iterator([TEXT], trainer)
    return BraidTokenizer(backend, SpecialTokens(pad=None, order=("<|endoftext|>",)))


def gpt2(tokenizer: BraidTokenizer, seed: int = 0, positions: int = 256) -> Any:
    """A small GPT-2 of transformers, with weights that make every token matter."""
    config = GPT2Config(vocab_size=tokenizer.vocab_size, n_positions=positions, n_embd=16, n_layer=2, n_head=2)
    return randomised(GPT2LMHeadModel(config), seed).eval()


def fast(tokenizer: BraidTokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer as transformers has it."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, clean_up_tokenization_spaces=False)


@torch.no_grad()
def log_probabilities(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)


def phrase_sum(model: Any, tokenizer: Any, sentence: str, completion: str) -> float:
    """The tokens that reach into the completion, which ends the sentence; the first token is never predicted."""
    coded = tokenizer(sentence, return_offsets_mapping=True)
    ids, start = coded["input_ids"], len(sentence) - len(completion)
    chances = log_probabilities(model, ids)
    mask = [end > start for _, end in coded["offset_mapping"]]
    return sum(float(chances[at - 1, ids[at]]) for at in range(1, len(ids)) if mask[at])


def word_chance(model: Any, tokenizer: Any, sentence: str, word: str) -> float:
    """The reading task's probability of a word: pieces of the word alone, each after the text so far, encoded anew."""
    found = 1.0
    for at, piece in enumerate(tokenizer(word, add_special_tokens=False)["input_ids"]):
        text = tokenizer.decode(piece)
        target = piece if at == 0 else tokenizer(text, add_special_tokens=False)["input_ids"][0]
        found *= math.exp(float(log_probabilities(model, tokenizer(sentence)["input_ids"])[-1, target]))
        sentence += text
    return found


def explained(columns: list[np.ndarray], target: np.ndarray) -> float:
    """R2 by least squares on the columns as they are, with an intercept."""
    x = np.column_stack([np.ones(len(target)), *columns])
    residual = target - x @ np.linalg.lstsq(x, target, rcond=None)[0]
    return 1 - (residual**2).sum() / ((target - target.mean()) ** 2).sum()
