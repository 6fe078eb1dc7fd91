"""`python -m heedful.inspector`: see heedful.inspector.command."""

import sys

from heedful.inspector.command import main

sys.exit(main())
