"""`python -m moe_runtime`."""

import sys

from moe_runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())
