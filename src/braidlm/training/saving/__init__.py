"""Saving a run and resuming it: checkpoints, the state beside them, and the states of earlier versions."""
