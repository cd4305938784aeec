"""``python -m recipe``."""

from __future__ import annotations

import sys

from recipe.run.cli import main

if __name__ == "__main__":
    sys.exit(main())
