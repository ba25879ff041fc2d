"""PaPaformer checkpoints of any structure with random tensors, and a slow reference of their function."""

import math

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def block_tensors(name: str, width: int, hidden: int) -> Tensors:
    """One block of theirs."""
    shapes = {
        **{f"attention.{letter}.linear.weight": (width, width) for letter in "QKV"},
        "feedforward.linear1.weight": (hidden, width),
        "feedforward.linear2.weight": (hidden, width),
        "feedforward.linear3.weight": (width, hidden),
        "feedforward.beta": (1, hidden),
        "norm_1.weight": (width,),
        "norm_2.weight": (width,),
    }
    return {f"{name}.{part}": _random(part, shape) for part, shape in shapes.items()}


def ends_tensors(width: int, vocab_size: int) -> Tensors:
    """Embedding, last norm and head."""
    shapes = {
        "embeddings.weight": (vocab_size, width),
        "norm.weight": (width,),
        "Linear.linear.weight": (vocab_size, width),
    }
    return {name: _random(name, shape) for name, shape in shapes.items()}


def dense_tensors(width: int = 16, blocks: int = 3, hidden: int = 40, vocab_size: int = 31) -> Tensors:
    """A path or a dense model."""
    torch.manual_seed(3)
    tensors = ends_tensors(width, vocab_size)
    for number in range(blocks):
        tensors |= block_tensors(f"layers.{number}.block", width, hidden)
    return tensors


def whole_tensors(
    join: str,
    dim: int = 24,
    path_dim: int = 8,
    paths: int = 3,
    layers: int = 2,
    multiplier: int = 3,
    vocab_size: int = 31,
) -> Tensors:
    """A whole model with shared linear connections or a Gumbel mixture."""
    torch.manual_seed(4)
    tensors = ends_tensors(dim, vocab_size)
    tensors |= block_tensors("layers.0.block", dim, multiplier * dim)
    tensors["layers.0.Share.linear.weight"] = _random("", (path_dim, dim))
    together = paths * path_dim
    for number in range(1, layers + 1):
        for path in range(paths):
            tensors |= block_tensors(f"layers.{number}.blocks.{path}", path_dim, multiplier * path_dim)
        here = f"layers.{number}"
        if join == "shared_linear":
            tensors[f"{here}.Share.linear.weight"] = _random("", (dim if number == layers else path_dim, together))
            continue
        router = path_dim if join == "gumbel_v1" else together
        tensors[f"{here}.MoE.share_linear.weight"] = _random("", (path_dim, together))
        tensors[f"{here}.MoE.share_linear.bias"] = _random("", (path_dim,))
        tensors[f"{here}.MoE.router.weight"] = _random("", (paths + 1, router))
        tensors[f"{here}.MoE.router.bias"] = _random("", (paths + 1,))
    if join != "shared_linear":
        tensors[f"layers.{layers}.out_linear.linear.weight"] = _random("", (dim, path_dim))
    return tensors | block_tensors(f"layers.{layers + 1}.block", dim, multiplier * dim)


def reference_logits(tensors: Tensors, ids: Tensor, heads: int, path_heads: int = 1) -> tuple[Tensor, list[int]]:
    """The logits of one text [time] in float64, and which choice each router made of each token."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    x, choices = weights["embeddings.weight"][ids], []
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    for layer in (f"layers.{number}" for number in range(layers)):
        if f"{layer}.block.norm_1.weight" in weights:
            x = _block(weights, f"{layer}.block", x, heads)
            if f"{layer}.Share.linear.weight" in weights:
                x = x @ weights[f"{layer}.Share.linear.weight"].T
            continue
        paths = []
        while f"{layer}.blocks.{len(paths)}.norm_1.weight" in weights:
            paths.append(_block(weights, f"{layer}.blocks.{len(paths)}", x, path_heads))
        if f"{layer}.Share.linear.weight" in weights:
            x = torch.cat(paths, -1) @ weights[f"{layer}.Share.linear.weight"].T
            continue
        x, chosen = _mixture(weights, f"{layer}.MoE", paths)
        choices += chosen
        if f"{layer}.out_linear.linear.weight" in weights:
            x = x @ weights[f"{layer}.out_linear.linear.weight"].T
    return _rms(x, weights["norm.weight"]) @ weights["Linear.linear.weight"].T, choices


def _mixture(weights: Tensors, name: str, paths: list[Tensor]) -> tuple[Tensor, list[int]]:
    rows, chosen = [], []
    for time in range(len(paths[0])):
        side_by_side = torch.cat([path[time] for path in paths])
        combined = weights[f"{name}.share_linear.weight"] @ side_by_side + weights[f"{name}.share_linear.bias"]
        router = weights[f"{name}.router.weight"]
        reads = combined if router.shape[1] == len(combined) else side_by_side
        choice = int((router @ reads + weights[f"{name}.router.bias"]).argmax())
        rows.append([*(path[time] for path in paths), combined][choice])
        chosen.append(choice)
    return torch.stack(rows), chosen


def _block(weights: Tensors, name: str, x: Tensor, heads: int) -> Tensor:
    normed = _rms(x, weights[f"{name}.norm_1.weight"])
    query, key, value = (normed @ weights[f"{name}.attention.{letter}.linear.weight"].T for letter in "QKV")
    each_head = zip(*(y.chunk(heads, -1) for y in (query, key, value)), strict=True)
    x = x + torch.cat([_attend(*three) for three in each_head], -1)
    normed = _rms(x, weights[f"{name}.norm_2.weight"])
    gate = normed @ weights[f"{name}.feedforward.linear1.weight"].T
    swish = gate / (1 + torch.exp(-weights[f"{name}.feedforward.beta"][0] * gate))
    up = normed @ weights[f"{name}.feedforward.linear2.weight"].T
    return x + (swish * up) @ weights[f"{name}.feedforward.linear3.weight"].T


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key = _rotated(query), _rotated(key)
    rows = []
    for time in range(len(query)):
        scores = key[: time + 1] @ query[time] / math.sqrt(query.shape[1])
        rows.append(scores.softmax(0) @ value[: time + 1])
    return torch.stack(rows)


def _rotated(x: Tensor) -> Tensor:
    """Neighbouring channels rotated together, by the position times a power of 10000."""
    rotated = x.clone()
    for time in range(len(x)):
        for even in range(0, x.shape[1], 2):
            angle = time * 10000.0 ** (-even / x.shape[1])
            a, b = x[time, even], x[time, even + 1]
            rotated[time, even] = a * math.cos(angle) - b * math.sin(angle)
            rotated[time, even + 1] = a * math.sin(angle) + b * math.cos(angle)
    return rotated


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    """Norms and betas off 1, matrices large enough that every part matters."""
    noise = torch.randn(shape)
    return 1 + 0.3 * noise if "norm" in name or "beta" in name else noise / math.sqrt(shape[-1]) * 1.3
