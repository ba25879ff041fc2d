"""`python -m braidlm` is `braid`; torchrun starts it this way."""

import sys

if not sys.flags.safe_path:  # Python puts the current folder first, where a stranger's module may lie
    del sys.path[0]

from braidlm.cli.main import main

sys.exit(main())
