"""Floor 0: the self-contained model. It imports torch and transformers and nothing of ours from outside this folder.

Flat and relatively imported, because transformers copies exactly such files into an exported model folder.
"""
