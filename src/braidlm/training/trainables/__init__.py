"""What a run trains: the contract that the loop knows, and the kinds of models that keep it."""
