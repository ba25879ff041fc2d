"""WikiText-2: articles of Wikipedia, the field's usual text for perplexity."""

from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.files.json_rows import rows_of
from braidlm.evals.files.text_files import TextFile, files_of, sha256_of_files
from braidlm.evals.formats.wiki_pages import WikiPages, pages_of
from braidlm.evals.tasks.task import TASKS, Task

NAMES = {
    "test": ("test.txt", "wiki.test.tokens", "wiki.test.raw", "test.jsonl"),
    "valid": ("valid.txt", "validation.txt", "wiki.valid.tokens", "wiki.valid.raw", "validation.jsonl", "valid.jsonl"),
}
EXAMPLE = '{"page": " = Title = \\n\\n Text . \\n"}'


@TASKS.register("wikitext2")
class WikiText2(Task):
    """Test and validation, by pages (lm-evaluation-harness, tasks/wikitext, reads the raw version of the same)."""

    description = "WikiText-2: bits per byte of the original text; perplexity per word beside it"
    size = "62 pages (test) and 60 (validation)"
    licence = "CC BY-SA (Wikipedia)"
    metric = "bits per byte (test)"
    locations = ("choice/wikitext2", "wikitext2", "wikitext-2", "wikitext-2-raw")
    hub = HubSource("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", ("test", "validation"))

    def open(self, path: Path) -> WikiPages:
        if path.is_file():
            files = {path.stem: files_of(path)[0]}
        else:
            paths = {split: [path / n for n in names if (path / n).is_file()] for split, names in NAMES.items()}
            files = {split: files_of(candidates[0])[0] for split, candidates in paths.items() if candidates}
        splits = {split: _pages(file) for split, file in files.items()}
        splits = {split: pages for split, pages in splits.items() if pages}
        if not splits:
            raise BraidError(f"there is no {' and no '.join(names[0] for names in NAMES.values())} here", str(path))
        return WikiPages(splits, sha256_of_files(list(files.values())))


def _pages(file: TextFile) -> list[str]:
    if file.name.endswith(".jsonl"):
        return [row.text("page") for row in rows_of([file], file.where, EXAMPLE)]
    return pages_of(file.text)
