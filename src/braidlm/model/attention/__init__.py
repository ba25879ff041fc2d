"""Softmax attention, banks of attention experts, and positions."""
