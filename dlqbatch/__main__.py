"""`python -m dlqbatch` is the command line."""

import sys

from dlqbatch.cli import main

sys.exit(main())
