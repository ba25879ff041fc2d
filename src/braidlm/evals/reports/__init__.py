"""Results as tables, pages and figures, in the folder of an evaluation."""
