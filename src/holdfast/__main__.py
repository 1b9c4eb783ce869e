"""`python -m holdfast` is `holdfast`."""

import sys

from holdfast.cli import main

sys.exit(main())
