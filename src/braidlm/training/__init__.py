"""Floor 2: from a recipe to a trained model folder."""
