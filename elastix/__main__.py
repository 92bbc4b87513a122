"""`python -m elastix`: the command line."""

import sys

from elastix.cli import main

sys.exit(main())
