"""What an evaluation found, as tables, pages and pictures."""
