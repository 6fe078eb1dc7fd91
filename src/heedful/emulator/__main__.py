"""`python -m heedful.emulator`: see heedful.emulator.command."""

import sys

from heedful.emulator.command import main

sys.exit(main())
