"""`python -m app` is `kimad`."""

import sys

from app.cli import main

sys.exit(main())
