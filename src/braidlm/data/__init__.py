"""Floor 2: text sources, built-in corpora, tokenizers, packed token files and the loader."""
