"""Compile kernels for an H200, for which none has to be there, and print the stack of their threads in bytes, as JSON.

A program whose values do not fit into its registers keeps them there, in memory, and is many times slower. To be
run as a program of its own, where Triton does not interpret.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from braidlm.kernels.routed import permutation, router, routing_measures
from braidlm.kernels.routed.grouped import layers, sums

H200 = GPUTarget("cuda", 90, 32)
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
EXPERTS = (16, 32, 64)
TYPES = {"chosen": "*i64", "stream": "*bf16", "gradient": "*bf16", "routed_to": "*u8", "real": "*u8"}
INTEGERS = {"counts", "source", "row_of_choice", "tile_expert", "sequence_offsets", "expert_offsets"}
NUMBERS = {"rows", "width", "choices", "length", "parts", "experts", "chunks", "tiles", "tokens", "chunk"}


def stack_of(kernel: Any, **constants: Any) -> int:
    """Bytes of stack of each thread, where a tensor is of the type that its name has in all kernels here."""
    signature = {name: "constexpr" if name in constants else _type(name) for name in kernel.arg_names}
    aligned = [["tt.divisibility", 16]]
    tensors = {(i,): aligned for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=tensors)
    compiled = triton.compile(source, target=H200, options={"num_warps": 4})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        printed = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", printed)
    assert found, printed
    return int(found[1])


def _type(name: str) -> str:
    if name in NUMBERS:
        return "i32"
    return "*i32" if name in INTEGERS else TYPES.get(name, "*fp32")


def kernels_of(experts: int) -> dict[str, int]:
    """The kernels whose blocks grow with the number of experts, of which each token has 4."""
    block = router._block(384, experts)
    counted = {"CHOICES": 4, "CHUNK": 64, "EXPERTS": experts}
    of_rows = {"CHOICES": 4, "TILE": 128, "EXPERTS": experts}
    return {
        "means": stack_of(
            routing_measures._sum_choices, TOP_K=4, MEANS=4, TOKENS=routing_measures.block_tokens(experts),
            CHOICES=experts,
        ),
        "route": stack_of(
            router._route_forward, TOP_K=4, RENORMALISE=True, ROWS=block["ROWS"], COLUMNS=block["COLUMNS"],
            CHOICES=experts, bias=None, balance=None,
        ),
        "count": stack_of(permutation._count, **counted),
        "scatter": stack_of(permutation._scatter_rows, **counted, COUNTS=permutation.CHUNKS, TILE=128),
        "weights": stack_of(
            layers._weights_gradient, **of_rows, WIDTH=384, PADDED_CHOICES=4, PARTS=4,
            TOKENS=layers.TOKENS, CHANNELS=layers.CHANNELS,
        ),
        "sums": stack_of(
            sums._token_sums, **of_rows, OUTPUTS=384, TOKENS=sums.TOKENS, COLUMNS=sums.TOKEN_COLUMNS
        ),
    }  # fmt: skip


if __name__ == "__main__":
    print(
        json.dumps(
            {f"{name} of {experts}": stack for experts in EXPERTS for name, stack in kernels_of(experts).items()}
        )
    )
