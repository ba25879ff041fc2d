"""What the server of forked processes imports and computes before it forks the first of them."""

import gc
from importlib import import_module

from braidlm.model.bundle import bundle

for _name in ("hydra", "braidlm.cli.main", "braidlm.cli.train", "braidlm.studies.decoding", "braidlm.training.train"):
    import_module(_name)
bundle()  # the code that every checkpoint carries
gc.collect()
gc.freeze()  # else each process looks through all this again, and copies it
