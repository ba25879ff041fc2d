"""Floor 5: from a recipe to a trained model folder."""
