"""From prompts to text: the decoding loop with its cache, early exits, prompts and generation."""
