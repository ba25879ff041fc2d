"""Fast forms of parts for passes that torch runs operation by operation, as it does on a CPU: one file each."""
