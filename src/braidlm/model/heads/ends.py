"""What embeddings and heads share."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn


class ModelEnd(nn.Module):
    """An embedding or a head: the rest of the code asks it and never reads its weights."""

    composed: ClassVar[dict[str, str]] = {}
    """How `compose` makes each parameter from the paths', "side by side" or "added up"; it refuses a part without."""

    @classmethod
    def composed_config(cls, configs: Sequence[Any]) -> Any:
        """That of the whole from those of the paths; None if they do not fit together."""
        return configs[0] if all(config == configs[0] for config in configs) else None

    def read_tokenizer(self, tokens: Sequence[bytes | None]) -> None:
        """Take over the bytes of each token by its id, None for those without, such as the end of text."""

    def agrees_with(self, tokens: Sequence[bytes | None]) -> bool:
        """Whether these are the tokens that were read; an end that reads none agrees with any."""
        return True
