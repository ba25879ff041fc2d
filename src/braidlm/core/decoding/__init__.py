"""From prompts to text: the decoding loop with its cache, generation, prompt files."""
