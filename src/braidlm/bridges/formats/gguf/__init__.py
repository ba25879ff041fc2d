"""GGUF, the one file that llama.cpp runs: weights, hyperparameters and the tokenizer together."""
