# A name of the package itself is of any type: its own file names the modules of all models, and
# reading those took pyright 12 s of 110. Modules keep their types (py.typed: partial).
from typing import Any

def __getattr__(name: str) -> Any: ...
