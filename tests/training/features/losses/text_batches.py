"""Batches of text for losses that arrange them."""

from typing import Any

import numpy as np

from braidlm.data.loading.batches import Batch, GlobalBatch
from tests.tiny_models import VOCABULARY, random_ids


def batch_of(
    rows: int,
    time: int,
    lengths: Any = None,
    first: int = 0,
    own: int | None = None,
    text: np.ndarray | None = None,
    seed: int = 0,
) -> Batch:
    """Rows of random text, of which positions up to `lengths` are trained; `own` of them are this process's.

    The last token of the vocabulary is in no text.
    """
    tokens = random_ids(rows, time + 1, seed, VOCABULARY - 1).numpy() if text is None else text
    trained = np.full(rows, time) if lengths is None else np.array(lengths)
    mine = tokens[first : first + (own or rows)]
    words, sources = np.ones((rows, time), np.uint8), np.zeros(rows, np.int64)
    whole = GlobalBatch(mine, words, sources, first, trained, np.zeros(len(mine), bool), np.zeros_like(mine[:, 1:]))
    return whole.piece(0, int(trained.sum()))
