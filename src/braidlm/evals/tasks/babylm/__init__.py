"""The tasks of the BabyLM 2025 challenge, but for GLUE."""
