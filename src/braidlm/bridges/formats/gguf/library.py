"""The `gguf` package, which nothing else of Braid needs."""

from types import ModuleType

from braidlm.core.errors import BraidError


def import_gguf() -> ModuleType:
    """The package, or an error that says how to get it."""
    try:
        import gguf
    except ImportError:
        raise BraidError("writing GGUF needs the package 'gguf'", todo="pip install 'braidlm[device]'") from None
    return gguf
