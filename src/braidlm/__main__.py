"""`python -m braidlm` is `braid`; torchrun starts it this way."""

import sys

from braidlm.cli.main import main

sys.exit(main())
