"""`braid prepare`: text into packed token files."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

from braidlm.cli.settings import add_cluster, add_settings, number, options_of
from braidlm.core.console import say, show_json
from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Count, Positive, VocabularySize, Workers

if TYPE_CHECKING:
    from braidlm.data.packing.packed_data import PackedData

HELP = "text, JSONL, CSV, parquet or a Hub data set, into packed token files (parallel, resumable)"
EPILOG = """examples:
  braid prepare stories --documents 20000 --vocab-size 1024 --out data/stories
  braid prepare 'corpus/*.txt.gz' --separator lines --out data/childes
  braid prepare train=corpus/train dev=corpus/dev --separator 'childes*=lines' --out data/corpus
  braid prepare maths.jsonl --field question --field answer --out data/maths --tokenizer data/stories
  braid prepare maths.jsonl --field question --answer solution --out data/answers
  braid prepare 's3://texts/web/*.jsonl.zst' --out s3://packed/web
  braid prepare hub:roneneldan/TinyStories --limit-words 10000000 --out data/tiny
"""
HERE = ("fields", "joiner", "template", "separator")
"""The fields of `ReadOptions` that have options of their own kind."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from braidlm.data.sources.format import TEMPLATE, ReadOptions
    from braidlm.data.tokenizing.tokenizer import SpaceBefore

    add = parser.add_argument
    about = (
        "file, folder, glob, address (s3://...), hub:NAME[@REVISION][:SPLIT], stories, maths, arithmetic, python; "
        "NAME=SOURCE makes several data sets"
    )
    add("sources", nargs="+", metavar="SOURCE", help=about)
    add("--out", required=True, metavar="DIR", help="the folder to write, or an address (s3://...) for shards")
    add("--name", help="the data set's name (the folder's, unless given)")
    add("--replace", action="store_true", help="replace an existing data set")
    add("--workers", type=number(Workers), metavar="N", help="processes (all cores, unless given)")
    add_cluster(parser)
    add("--limit-documents", type=number(Count), metavar="N", help="take at most so many documents")
    add("--limit-words", type=number(Count), metavar="N", help="take whole documents up to so many words")

    add = parser.add_argument_group("tokenizer").add_argument
    add("--tokenizer", default="bpe", metavar="T", help="bpe (train one), bytes, a folder or file, or a Hub name")
    add("--vocab-size", type=number(VocabularySize), metavar="N", help="tokens of a trained one (16384)")
    special = "a special token, in the order of ids; roles: eos, bos, pad, unk, mask"
    add("--special", dest="special_tokens", action="append", metavar="[ROLE=]TOKEN", help=special)
    add("--begin", action="store_true", help="a trained one begins every text with the token that ends one")
    choices = get_args(SpaceBefore)
    add("--space-before", choices=choices, default=choices[0], help=f"where a trained one adds a space ({choices[0]})")
    sample = "text to train on, spread over the data (64)"
    add("--sample-mb", type=number(Positive), default=64, metavar="MB", help=sample)

    add = parser.add_argument_group("reading").add_argument
    fields = "JSONL, CSV, parquet, Hub: field with the text (text); several: joined"
    add("--field", dest="fields", action="append", metavar="NAME", help=fields)
    add("--joiner", default="\\n", metavar="TEXT", help="text between fields (\\n)")
    template = TEMPLATE.replace("\n", "\\n")
    add("--template", default=template, metavar="TEXT", help=f"with an answer: the text of a document ({template})")
    separator = "text files: blank (lines), lines, file, or a text (blank); several: by patterns of file names"
    add("--separator", action="append", metavar="[PATTERN=]S", help=separator)
    add_settings(parser, ReadOptions, "reading by kind of source", but=HERE)


def run(args: argparse.Namespace) -> None:
    from braidlm.data.packing.prepare import named_sources, prepare, prepare_sets
    from braidlm.data.sources.text import parse_separators, unescaped

    reading = {
        "fields": args.fields or ("text",),
        "joiner": unescaped(args.joiner),
        "template": unescaped(args.template),
        "separator": parse_separators(args.separator or []),
    }
    options = options_of(args, "sources") | reading
    if (sets := named_sources(args.sources)) is None:
        _show(data := prepare(args.sources, **options))
        show_json(_facts(data))
        return
    if options.pop("name") is not None:
        raise BraidError("several data sets have the names that they are given with", "--name", "Leave it out.")
    if args.tokenizer == "bpe" and len(sets) > 1:
        say(f"The tokenizer is trained on {next(iter(sets))} alone and used for all: the others may be held out.")
    packed = prepare_sets(sets, **options)
    for data in packed.values():
        _show(data)
    show_json({name: _facts(data) for name, data in packed.items()})


def _facts(data: "PackedData") -> dict[str, Any]:
    return {"folder": data.address, **asdict(data.manifest)}


def _show(data: "PackedData") -> None:
    from braidlm.core.report.rendering import show_report
    from braidlm.core.report.report import Table

    facts = data.manifest
    rows = [
        ("documents", f"{facts.documents:,}"),
        ("words", f"{facts.words:,}"),
        ("tokens", f"{facts.tokens:,} ({facts.dtype})"),
        ("bytes", f"{facts.bytes:,}"),
        ("bytes per token", f"{facts.bytes / facts.tokens:.2f}"),
        ("tokenizer", f"{facts.vocab_size:,} tokens, {facts.tokenizer[:12]}"),
        ("folder", data.address),
    ]
    if facts.targets is not None:
        rows.insert(4, ("answers", f"{facts.targets.tokens:,} of the tokens, {facts.targets.bytes:,} bytes"))
    rows += [(f"left out: {reason}", f"{number:,}") for reason, number in facts.source.get("left_out", {}).items()]
    show_report(Table((facts.name, ""), rows))
