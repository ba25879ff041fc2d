"""OpenAI's API over HTTP: bodies, answers, errors, safety and metrics."""
