"""heedful as an attention implementation of Hugging Face transformers:

    import heedful.integrations.transformers as plug_in

    plug_in.register()
    AutoModelForCausalLM.from_pretrained(name, attn_implementation="heedful")

May import `heedful.integrations`.
"""

from heedful.integrations import check

check("transformers")

from heedful.integrations.transformers.paths import paths as paths  # noqa: E402
from heedful.integrations.transformers.paths import reset_paths as reset_paths  # noqa: E402
from heedful.integrations.transformers.registering import (  # noqa: E402
    is_registered as is_registered,
)
from heedful.integrations.transformers.registering import register as register  # noqa: E402
from heedful.integrations.transformers.registering import unregister as unregister  # noqa: E402

__all__ = ["is_registered", "paths", "register", "reset_paths", "unregister"]
