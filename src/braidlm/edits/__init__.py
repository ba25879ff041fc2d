"""Edits: model folder(s) in, model folder out, every tensor accounted for. Bridges read foreign sources."""
