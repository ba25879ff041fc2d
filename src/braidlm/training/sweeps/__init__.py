"""Runs that belong together: every combination of a sweep, and the table of any runs."""
