"""Where the tests keep what local servers compile: the programs of one test are those of others."""

import os
from pathlib import Path

_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
COMPILE_CACHE = _cache / "elastix-tests" / "local-pathways"
