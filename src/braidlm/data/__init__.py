"""Floor 1: text sources, built-in corpora, tokenizers, packed token files and the loader."""
