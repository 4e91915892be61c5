"""python -m rayzero."""

import sys

from rayzero.app import main

sys.exit(main())
