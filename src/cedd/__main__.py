"""`python -m cedd` is `cedd`."""

import sys

from cedd.cli import main

sys.exit(main())
