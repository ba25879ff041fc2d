"""Rows of whole documents: as many as fit one after another, so that a question is always before its answer."""

import numpy as np


def document_rows(bounds: np.ndarray, length: int) -> np.ndarray:
    """Where rows of at most `length` tokens begin, for documents between `bounds` [documents + 1], in their order.

    A row ends where the next begins. A document that is longer than a row is cut into pieces of `length` tokens.
    """
    sizes = np.diff(bounds)
    pieces = np.maximum(-(-sizes // length), 1)
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    edges = np.append(np.repeat(bounds[:-1], pieces) + within * length, bounds[-1])
    furthest = (np.searchsorted(edges, edges + length, side="right") - 1).tolist()
    rows, edge = [], 0
    while edge < len(edges) - 1:
        rows.append(edge)
        edge = furthest[edge]
    return np.asarray(edges[rows])
