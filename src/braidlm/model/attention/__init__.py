"""How tokens read each other: softmax attention, banks of it, and positions."""
