"""The gradients of single rows: of all rows of a micro-batch at once, and one by one, which is the reference.

A row's loss is the sum over its labels divided by a number that is the same for all rows, so that no row's gradient
depends on another row.
"""

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from braidlm.kernels.replacing import plain_parts
from braidlm.training.step.objective import BatchLosses

RowGradients = Iterator[tuple[list[Tensor], BatchLosses]]
"""For some rows at a time, the gradients [row, ...] of each parameter, and the losses of these rows."""
Parameters = dict[str, Tensor]


def gradients_one_by_one(
    run: Callable[..., BatchLosses], parameters: Parameters, inputs: Tensor, labels: Tensor, count: Tensor
) -> RowGradients:
    """A pass of the objective for each row."""
    for row in zip(inputs.split(1), labels.split(1), strict=True):
        found = run(*row, count)
        gradients = torch.autograd.grad(_whole(found), list(parameters.values()), materialize_grads=True)
        yield [gradient[None] for gradient in gradients], found


def gradients_at_once(
    objective: nn.Module, parameters: Parameters, inputs: Tensor, labels: Tensor, count: Tensor
) -> RowGradients:
    """One pass for all rows; a RuntimeError where what is computed depends on values, as with experts."""

    def of_row(weights: Parameters, row: Tensor, label: Tensor) -> tuple[Tensor, tuple[Tensor, Parameters]]:
        found = functional_call(objective, weights, (row[None], label[None], count))
        return _whole(found), (found.text, found.usage)

    transformed = vmap(grad(of_row, has_aux=True), in_dims=(None, 0, 0), randomness="different")
    with plain_parts(objective), warnings.catch_warnings():
        # A CPU's attention is run row by row, which is faster than its plain products for all rows (LOG.md).
        warnings.filterwarnings("ignore", "There is a performance drop")
        detached = {name: parameter.detach() for name, parameter in parameters.items()}
        gradients, (texts, usage) = transformed(detached, inputs, labels)
    means = {name: shares.mean(0) for name, shares in usage.items()}
    yield list(gradients.values()), BatchLosses(texts.sum(), None, means, {})


def _whole(found: BatchLosses) -> Tensor:
    """What is minimised."""
    return found.text if found.routing is None else found.text + found.routing
