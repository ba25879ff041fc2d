"""Floor 6: edits, each a model made of one or several others with every tensor accounted for."""
