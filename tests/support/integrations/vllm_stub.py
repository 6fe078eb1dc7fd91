"""A package `vllm` of the recorded names: its classes have the recorded bases, fields, attributes
and signatures, and do the little that the plug-in stands on. What it does not need raises.

    with vllm_stub.installed():
        import heedful.integrations.vllm
"""

import abc
import dataclasses
import enum
import inspect
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar
from unittest import mock

RECORDING = json.loads((Path(__file__).parents[2] / "recordings" / "vllm.json").read_text())
OURS = "heedful.integrations.vllm"
_T = TypeVar("_T")
_NO = frozenset(
    f"supports_{what}"
    for what in (
        *("alibi_sqrt", "batch_invariance", "dcp", "mm_prefix", "non_causal", "pcp"),
        *("per_head_quant_scales", "rswa", "sink", "sliding_window", "non_causal_dcp"),
    )
) | {"is_mla", "is_sparse", "is_ssm"}


def signature(text: str) -> inspect.Signature:
    """Of a recorded one."""
    scope: dict[str, Any] = {}
    parameters = text.rpartition("@")[2].partition(" ")[2] if text[:1] == "@" else text
    exec(f"def f({parameters}): ...", scope)
    return inspect.signature(scope["f"])


def marks(text: str) -> list[str]:
    """The marks of a recorded function."""
    return [word[1:] for word in text.split() if word[0] == "@"]


def _asked(cls, use_mla, use_sparse, **asked) -> list[str]:
    """Names of what a backend refuses."""
    one_by_one = {
        "head_size": cls.supports_head_size(asked["head_size"]),
        "dtype": asked["dtype"] in cls.supported_dtypes,
        "kv_cache_dtype": asked["kv_cache_dtype"] in cls.supported_kv_cache_dtypes,
        "mla": use_mla == cls.is_mla(),
        "sparse": use_sparse == cls.is_sparse(),
        "attn_type": cls.supports_attn_type(asked["attn_type"]),
    }
    refused = [name for name, is_served in one_by_one.items() if not is_served]
    flags = {"has_sink": "sink", "has_sliding_window": "sliding_window"}
    names = {"adaptive_verification": "device_cpu_query_lens_mismatch"}
    names |= {"batch_invariant": "batch_invariance"}
    for name, value in asked.items():
        what = flags.get(name) or name.removeprefix("use_")
        if (name in flags or name.startswith("use_")) and value:
            what = names.get(what, what)
            refused += [] if getattr(cls, f"supports_{what}")() else [what]
    facts = signature(_facts("AttentionBackend")["methods"]["supports_combination"]).parameters
    given = {"use_mla": use_mla, "use_sparse": use_sparse, **asked}
    reason = cls.supports_combination(**{n: given[n] for n in facts if n != "cls"})
    return refused + ([reason] if reason else [])


def _keep(self, **given) -> None:
    """What constructors of vLLM's bases do with their arguments."""
    for name, value in given.items():
        setattr(self, name, value)


def _mixed_mode(self) -> enum.Enum:
    return type(self)(self.value[1]) if isinstance(self.value, tuple) else self


# By class and method what the plug-in stands on.
_DO: dict[tuple[str, str], Any] = {
    ("AttentionBackend", "validate_configuration"): _asked,
    ("AttentionBackend", "supports_head_size"): lambda cls, head_size: (
        head_size in cls.get_supported_head_sizes()
    ),
    ("AttentionBackend", "supports_attn_type"): lambda cls, attn_type: attn_type == "decoder",
    ("MLACommonBackend", "get_supported_head_sizes"): lambda cls: [320, 512, 576],
    ("MLACommonBackend", "is_mla"): lambda cls: True,
    ("AttentionBackend", "supports_kv_connector"): lambda cls: True,
    ("AttentionMetadataBuilder", "__init__"): _keep,
    ("MLACommonMetadataBuilder", "__init__"): _keep,
    ("MLACommonImpl", "__init__"): _keep,
    ("MLAPrefillBackend", "__init__"): _keep,
    ("MLAPrefillBackend", "prepare_metadata"): lambda self, prefill_metadata: setattr(
        self, "_prefill_metadata", prefill_metadata
    ),
    ("CUDAGraphMode", "mixed_mode"): _mixed_mode,
}
# Values that are computed there.
_COMPUTED = {
    ("CUDAGraphMode", "FULL_DECODE_ONLY"): (2, 0),
    ("CUDAGraphMode", "FULL_AND_PIECEWISE"): (2, 1),
}


def _facts(name: str) -> dict:
    return next(names[name] for names in RECORDING["modules"].values() if name in names)


def _never(cls: Any) -> bool:
    return False


def _method(owner: str, name: str, text: str) -> Any:
    """A method of the recorded signature."""
    own, wanted = _DO.get((owner, name)), signature(text)
    if own is None and name in _NO:
        own = _never

    def do(*args, **kwargs):
        bound = wanted.bind(*args, **kwargs)
        bound.apply_defaults()
        if own is None:
            raise NotImplementedError(f"{owner}.{name} is recorded alone")
        first, *_ = bound.arguments.values()
        return own(first, **dict(list(bound.arguments.items())[1:]))

    do.__name__ = name
    do.__signature__ = wanted  # pyright: ignore[reportFunctionMemberAccess]
    made: Any = do
    for mark in reversed(marks(text)):
        made = (
            abc.abstractmethod(made)
            if mark == "abstractmethod"
            else getattr(__import__("builtins"), mark)(made)
        )
    return made


def _value(owner: str, name: str, text: str | None) -> Any:
    if (owner, name) in _COMPUTED:
        return _COMPUTED[owner, name]
    return None if text in (None, "...") else eval(text, {})


def _enumeration(name: str, facts: dict) -> type:
    methods = facts.get("methods", {}).items()
    body = {n: _method(name, n, text) for n, text in methods if n[:2] != "__"}
    mixin = str if "str" in facts["bases"] else type(f"{name}Methods", (), body)
    namespace: Any = enum.EnumMeta.__prepare__(name, (mixin, enum.Enum))
    for member, text in facts["attributes"].items():
        namespace[member] = _value(name, member, text)
    return enum.EnumMeta(name, (mixin, enum.Enum), namespace)


def _class(name: str, facts: Any, known: dict[str, Any], module: str) -> type:
    attributes = facts.get("attributes", {})
    if {"Enum", "enum.Enum"} & {*facts["bases"]}:
        return _enumeration(name, facts)
    body: dict[str, Any] = {"__module__": module}
    body |= {n: _value(name, n, text) for n, text in attributes.items() if text is not None}
    methods = facts.get("methods", {}).items()
    body |= {n: _method(name, n, text) for n, text in methods if n == "__init__" or n[:2] != "__"}
    for inner, own in facts.get("classes", {}).items():
        body[inner] = _class(inner, own, known, module)
    bases = []
    for base in facts["bases"]:
        found = {"ABC": abc.ABC, "Generic[]": Generic}.get(base) or known[base.removesuffix("[]")]
        bases.append(found[_T] if base.endswith("[]") else found)
    if "fields" in facts:
        body = {n: x for n, x in body.items() if n not in facts["fields"]}
        fields = []
        for field, text in facts["fields"].items():
            own: tuple = (field, Any)
            if text is not None:
                default = _value(name, field, text)
                own = (*own, dataclasses.field(default=default))
            fields.append(own)
        return dataclasses.make_dataclass(name, fields, bases=tuple(bases), namespace=body)
    return types.new_class(name, tuple(bases), {}, lambda namespace: namespace.update(body))


class Registry:
    """An enumeration of backends whose members may be added, and one that waits for a class."""

    def __init__(self) -> None:
        self.__members__: dict[str, Registry.Member] = {"CUSTOM": Registry.Member(None)}
        self.CUSTOM = self.__members__["CUSTOM"]

    @dataclasses.dataclass(eq=False)
    class Member:
        path: str | None

        def is_overridden(self) -> bool:
            return self.path is not None

        def get_path(self) -> str | None:
            return self.path

        def get_class(self) -> type:
            module, _, name = str(self.path).rpartition(".")
            return getattr(__import__(module, fromlist=[name]), name)

    def put(self, backend: Any, class_path: str | None = None, is_mamba: bool = False) -> None:
        """As `register_backend`."""
        if isinstance(backend, str):
            assert backend not in self.__members__, f"{backend} exists already"
            backend = self.__members__.setdefault(backend, Registry.Member(None))
        backend.path = class_path


def modules() -> dict[str, types.ModuleType]:
    """The package's modules by their names."""
    made: dict[str, types.ModuleType] = {}
    known: dict[str, Any] = {}
    for name, names in RECORDING["modules"].items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        waiting = {n: own for n, own in names.items() if isinstance(own, dict)}
        registry = Registry()
        for each, own in names.items():
            if own == "variable":
                setattr(made[name], each, False)
            elif isinstance(own, str):
                setattr(made[name], each, registry.put)
        while waiting:
            for each, own in list(waiting.items()):
                if not any(base.removesuffix("[]") in waiting for base in own["bases"]):
                    is_registry = each.endswith("BackendEnum")
                    found = registry if is_registry else _class(each, own, known, name)
                    known[each] = found
                    setattr(made[name], each, found)
                    del waiting[each]
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        module.__path__ = []
        if parent:
            setattr(made[parent], last, module)
    return made


@contextmanager
def installed() -> Iterator[dict[str, types.ModuleType]]:
    """While it is open, `import vllm` finds these, and the plug-in is imported anew."""
    from heedful import integrations

    found = integrations.version

    def version(name: str) -> str:
        return RECORDING["version"] if name == "vllm" else found(name)

    before = {n: m for n, m in sys.modules.items() if n == OURS or n.startswith(f"{OURS}.")}
    for name in before:
        del sys.modules[name]
    made = modules()
    sys.modules.update(made)
    with mock.patch.object(integrations, "version", version):
        yield made
    for name in [*made, *(n for n in sys.modules if n == OURS or n.startswith(f"{OURS}."))]:
        del sys.modules[name]
    sys.modules.update(before)
    if hasattr(integrations, "vllm"):
        delattr(integrations, "vllm")
