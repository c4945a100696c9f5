"""`python -m paralab` is `paralab`: torchrun starts ranks by module name."""

from __future__ import annotations

import sys

from paralab.cli import main

if __name__ == "__main__":  # ranks import their parent's main module again, and must not run it
    sys.exit(main())
