"""Where the tests keep what local servers compile: the programs of one test are those of others."""

import os
from pathlib import Path

_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
_folder = _cache / "elastix-tests" / "local-pathways"
try:
    _folder.mkdir(parents=True, exist_ok=True)
    COMPILE_CACHE = _folder if os.access(_folder, os.W_OK) else None
except OSError:
    COMPILE_CACHE = None
