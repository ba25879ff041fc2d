"""What gates cost: the latency of forward passes with and without them, and training steps beside a Trainer's.

python benchmarks/gates_cost.py --device cuda             # 1.3B Llama shape, batch 1 and 16
python benchmarks/gates_cost.py --device cuda --launched --batches 1    # what launching costs the host, in turns
python benchmarks/gates_cost.py --device cuda --train     # 7B Llama shape, matrix gates: base frozen, base trained
python benchmarks/gates_cost.py --shape tiny [--train]    # the same at a size for a CPU
"""

import argparse
import copy
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from measure import compared_seconds, interleaved_clocks, record
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Trainer, TrainingArguments

from braidlm.kernels.lower import replace_parts
from braidlm.model.config.strict import decode
from braidlm.model.gates import GatesConfig
from braidlm.opening.gating import attach, gates_of
from braidlm.training.amounts import Amount
from braidlm.training.decoder import TrainableDecoder
from braidlm.training.recipe import TrainingConfig
from braidlm.training.start_from import train_gates_alone
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4},
    "1.3b": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}
VOCABULARY = 32_000
TINY_VOCABULARY = 500
LIMITS = {"vector": 0.02, "scalar": 0.02, "matrix": 0.08}
"""The largest overhead that each kind should have."""


def vocabulary(shape: str) -> int:
    return TINY_VOCABULARY if shape == "tiny" else VOCABULARY


def llama(shape: str, length: int, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary(shape), max_position_embeddings=length, **SHAPES[shape])
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device)


def with_gates(model: PreTrainedModel, kind: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model with gates; with a type, they have it as in a whole folder that is opened in it."""
    attach(model, decode(GatesConfig, {"kind": kind}))
    if model.device.type == "cuda":
        replace_parts(model)
    for gate in gates_of(model).values():
        gate.to(dtype=dtype)
        torch.nn.init.normal_(gate.get_parameter("weight"), std=0.01)
    return model


def forward(model: PreTrainedModel, ids: Tensor) -> Callable[[], Any]:
    @torch.no_grad()
    def run() -> Any:
        return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    return run


def replayed(run: Callable[[], Any]) -> Callable[[], None]:
    """A pass as a CUDA graph: what the device computes, without the time that Python takes to launch it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def latency_rows(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    base = llama(args.shape, args.length, device, dtype).eval()
    models = {"none": base, "none, a copy": copy.deepcopy(base)}  # the second says how far two equal models differ
    models |= {kind: with_gates(copy.deepcopy(base), kind, dtype) for kind in LIMITS}
    if dtype != torch.float32:
        models["matrix in float32"] = with_gates(copy.deepcopy(base), "matrix")
    rows = []
    for batch in args.batches:
        ids = torch.randint(vocabulary(args.shape), (batch, args.length), device=device)
        passes = {kind: forward(model, ids) for kind, model in models.items()}
        modes = {"eager": passes}
        if device.type == "cuda":
            modes["graph"] = {kind: replayed(run) for kind, run in passes.items()}
        for mode, runs in modes.items():
            seconds = compared_seconds(runs, args.calls, args.warmup, device, args.rounds)
            for kind, value in seconds.items():
                rows.append(
                    {
                        "shape": args.shape,
                        "batch": f"{batch} x {args.length}",
                        "mode": mode,
                        "gates": kind,
                        "ms": value * 1e3,
                        "overhead": value / seconds["none"] - 1,
                        "at most": LIMITS.get(kind.split(" ")[0], 0.0),
                    }
                )
    return rows


def with_bare_products(model: PreTrainedModel) -> PreTrainedModel:
    """The least that gates can cost a launched pass: one operation after a layer, with nothing around it."""
    for layer in model.model.layers[1:]:
        plain = type(layer)
        factors = torch.randn(model.config.hidden_size, device=model.device, dtype=model.dtype) * 0.01

        def call(
            self: Any, hidden: Tensor, *args: Any, plain: Any = plain, factors: Tensor = factors, **kwargs: Any
        ) -> Tensor:
            return torch.addcmul(plain.forward(self, hidden, *args, **kwargs), hidden, factors)

        layer.__class__ = type(plain.__name__, (plain,), {"__call__": call})
    return model


def launched_rows(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Passes in random order, each beside the plain model's of its round; a shared host is too noisy for less.

    The CPU time of the launching thread is what a gate costs the host, whatever else the machine does meanwhile.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    base = llama(args.shape, args.length, device, dtype).eval()
    models = {
        "none": base,
        "none, a copy": copy.deepcopy(base),
        "bare addcmul": with_bare_products(copy.deepcopy(base)),
    }
    models |= {kind: with_gates(copy.deepcopy(base), kind, dtype) for kind in LIMITS}
    rows = []
    for batch in args.batches:
        ids = torch.randint(vocabulary(args.shape), (batch, args.length), device=device)
        passes = {kind: forward(model, ids) for kind, model in models.items()}
        clocks = interleaved_clocks(passes, args.calls, args.warmup, device, args.rounds)
        for kind, (wall, host) in clocks.items():
            plain_wall, plain_host = clocks["none"]
            rows.append(
                {
                    "shape": args.shape,
                    "batch": f"{batch} x {args.length}",
                    "gates": kind,
                    "ms": 1e3 * median(wall),
                    "overhead": median(one / none for one, none in zip(wall, plain_wall, strict=True)) - 1,
                    "host ms": 1e3 * median(host),
                    "host overhead": median(one / none for one, none in zip(host, plain_host, strict=True)) - 1,
                    "at most": LIMITS.get(kind, 0.0),
                }
            )
    return rows


def our_steps(
    args: argparse.Namespace, device: torch.device, gates: str | None, frozen: bool
) -> tuple[float, PreTrainedModel]:
    """Seconds of an optimizer step by the code that `braid train` runs."""
    dtype = torch.bfloat16
    model = llama(args.shape, args.length, device, dtype)
    if gates is not None:
        attach(model, decode(GatesConfig, {"kind": gates}))
    if frozen:
        train_gates_alone(model)
    trained = TrainableDecoder(model, SimpleNamespace(has_gates=frozen))  # type: ignore[arg-type]
    precision: Any = "bf16" if frozen else "pure_bf16"
    config = TrainingConfig(
        budget=Amount(args.steps), batch=args.batch, precision=precision, activation_checkpointing=True
    )
    stepper = Stepper(trained, config, Rank(0, 1, device), dtype)
    tokens = np.random.default_rng(0).integers(1, vocabulary(args.shape), (args.batch, args.length + 1))
    seconds = float("inf")
    for _ in range(1 + args.steps):  # the first makes the optimizer's state
        begun = time.perf_counter()
        stepper.step(tokens[:, :-1].copy(), tokens[:, 1:].copy(), args.batch * args.length, 1e-5)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = min(seconds, time.perf_counter() - begun)
    return seconds, model


class RandomTexts(torch.utils.data.Dataset):
    """Random tokens; the labels are the tokens."""

    def __init__(self, count: int, length: int, vocab_size: int):
        self.ids = torch.randint(vocab_size, (count, length))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class TimedTrainer(Trainer):
    """transformers' Trainer; the time between the beginnings of two steps is that of a whole one."""

    begun: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.begun = [*getattr(self, "begun", []), time.perf_counter()]
        return super().training_step(*args, **kwargs)


def trainer_steps(args: argparse.Namespace, device: torch.device) -> tuple[float, PreTrainedModel]:
    """Seconds of a step by transformers' Trainer, of the whole model without gates in bf16."""
    model = llama(args.shape, args.length, device, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=2 + args.steps,
            per_device_train_batch_size=args.batch,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            learning_rate=1e-5,
            use_cpu=device.type == "cpu",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        texts = RandomTexts(args.batch * (2 + args.steps), args.length, vocabulary(args.shape))
        trainer = TimedTrainer(model, arguments, train_dataset=texts)
        trainer.train()
    return float(np.diff(trainer.begun)[1:].min()), model


def train_rows(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    cases: dict[str, Callable[[], tuple[float, PreTrainedModel]]] = {
        "braid, matrix gates, base frozen": lambda: our_steps(args, device, "matrix", frozen=True),
        "braid, matrix gates, base trained": lambda: our_steps(args, device, "matrix", frozen=False),
        "braid, no gates, base trained": lambda: our_steps(args, device, None, frozen=False),
        "transformers' Trainer, no gates, base trained": lambda: trainer_steps(args, device),
    }
    rows = []
    for name, case in cases.items():
        if args.only and args.only not in name:
            continue
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, model = case()
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        rows.append(
            {
                "shape": args.shape,
                "what": name,
                "batch": f"{args.batch} x {args.length}",
                "parameters": sum(p.numel() for p in model.parameters()),
                "trained": trained,
                "ms": seconds * 1e3,
                "tokens_per_second": args.batch * args.length / seconds,
                "peak_gib": peak,
            }
        )
        print(rows[-1], flush=True)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", action="store_true", help="training steps, not forward passes")
    parser.add_argument("--launched", action="store_true", help="passes launched one by one, with the host's own time")
    parser.add_argument("--shape", choices=SHAPES, help="by default 1.3b, and 7b for training")
    parser.add_argument("--length", type=int, help="tokens of a text: by default 512, and 1024 for training")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], help="texts of a forward pass")
    parser.add_argument("--calls", type=int, default=20, help="passes of a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="texts of a training step")
    parser.add_argument("--steps", type=int, default=3, help="training steps that are timed")
    parser.add_argument("--only", help="only the training whose name contains this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    args.shape = args.shape or ("7b" if args.train else "1.3b")
    args.length = args.length or (1024 if args.train else 512)
    if args.train:
        record("gates_train", device, train_rows(args, device), args.out)
    elif args.launched:
        record("gates_launched", device, launched_rows(args, device), args.out)
    else:
        record("gates_latency", device, latency_rows(args, device), args.out)


if __name__ == "__main__":
    main()
