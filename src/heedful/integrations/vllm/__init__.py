"""heedful as an attention backend of vLLM, which finds this plug-in by its entry point:

    vllm serve MODEL --attention-backend CUSTOM

May import `heedful.integrations`.
"""

from heedful.integrations import check

check("vllm")

from heedful.integrations.vllm.paths import paths as paths  # noqa: E402
from heedful.integrations.vllm.paths import reset_paths as reset_paths  # noqa: E402
from heedful.integrations.vllm.registering import is_registered as is_registered  # noqa: E402
from heedful.integrations.vllm.registering import register as register  # noqa: E402

__all__ = ["is_registered", "paths", "register", "reset_paths"]
