"""Opening any model that text can be read from: Braid's own, one that a bridge reads, or a decoder as it is."""

from pathlib import Path

from braidlm.bridges.bridge import folder_formats
from braidlm.bridges.opening import BRAID, OpenModel, model_type
from braidlm.core.models.runs import CONFIG
from braidlm.decoders.adapter import is_adapter
from braidlm.decoders.loading import OpenDecoder, decoder_in


def open_folder(folder: Path) -> OpenModel | OpenDecoder:
    """The model of a folder: as a Braid model where it is one or can be read as one, else as transformers' decoder."""
    if is_adapter(folder) or not (folder / CONFIG).is_file():
        return decoder_in(folder)
    return OpenModel(folder) if model_type(folder) in (BRAID, *folder_formats()) else decoder_in(folder)
