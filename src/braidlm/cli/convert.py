"""`braid convert`: models from and to other formats."""

import argparse
from pathlib import Path

from braidlm.cli.settings import options_of
from braidlm.core import console
from braidlm.opening.names import check_names

HELP = (
    "convert a model from or to gpt2, llama, mistral, moduleformer or qwen2, from moep_lm or papaformer, to gguf or "
    "onnx, or adapters of a decoder to one folder of transformers"
)
EPILOG = """examples:
  braid convert openai-community/gpt2 --from gpt2 --out models/gpt2
  braid convert runs/mine --to llama --out mine-llama --dry-run
  braid convert runs/mine --to gguf --dtype q8_0 --out mine.gguf
  braid convert runs/mine --to onnx --out mine-onnx
  braid convert runs/gates --to transformers --out whole
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = (
        "a model folder, a run or one model of a study, or a name on the Hub such as openai-community/gpt2; of "
        "papaformer the file of weights"
    )
    add("source", metavar="SOURCE", help=about)
    direction = parser.add_mutually_exclusive_group()
    about = "read SOURCE as gpt2, llama, moep_lm or papaformer and write a Braid model folder"
    direction.add_argument("--from", dest="from_", metavar="FORMAT", help=about)
    about = (
        "write the Braid model SOURCE as gpt2, llama, gguf or onnx; transformers writes gates or LoRA of a decoder and "
        "their base as one folder"
    )
    direction.add_argument("--to", metavar="FORMAT", help=about)
    add("--config", metavar="FILE", help="with papaformer: a JSON file of its options, such as the number of heads")
    about = "with --to gguf: the type of the matrices, f32 (default), f16, bf16, q8_0, q5_0 or q4_0, or a mixture by "
    about += "llama.cpp's own quantiser, where llama-cpp-python is installed: q6_k, q5_k_m or q4_k_m"
    add("--dtype", metavar="TYPE", help=about)
    add("--out", metavar="DIR", help="the folder to write, with gguf the file; it must not exist yet")
    add("--dry-run", action="store_true", help="show what would become what, and write nothing")


def run(args: argparse.Namespace) -> None:
    if args.from_ is None and not Path(args.source).is_file():  # what a format is read from, its bridge knows
        check_names(args.source, bare=True)
    from braidlm.opening.convert import convert

    plan = convert(**options_of(args))
    console.show_json({"model": None if args.dry_run else args.out, "plan": plan.lines()})
