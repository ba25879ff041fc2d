"""The BabyLM 2025 challenge: its own tasks, averages and files."""
