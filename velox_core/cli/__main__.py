"""``python -m velox_core.cli``, the same as ``velox``."""

from . import main

main()
