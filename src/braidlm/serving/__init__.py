"""Floor 8: a finished model at work, for people (the page) and for programs (OpenAI's API)."""
