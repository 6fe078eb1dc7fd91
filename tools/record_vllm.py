"""Records what heedful's plug-in needs of vLLM: names, bases, fields and signatures of its classes,
without a line of its code.

    pip download --no-deps vllm==0.33.0     # or its sdist
    python tools/record_vllm.py vllm-0.33.0*.whl

writes tests/recordings/vllm.json. Nothing of vLLM is imported or run.
"""

import ast
import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

RECORDING = Path(__file__).parents[1] / "tests" / "recordings" / "vllm.json"
# By modules what the plug-in and its tests ask them for.
WANTED = {
    "vllm.envs": ["VLLM_BATCH_INVARIANT"],
    "vllm.config.compilation": ["CUDAGraphMode"],
    "vllm.v1.kv_cache_layout": ["KVCacheLayout"],
    "vllm.v1.attention.backend": [
        "AttentionBackend",
        "AttentionCGSupport",
        "AttentionImpl",
        "AttentionImplBase",
        "AttentionMetadata",
        "AttentionMetadataBuilder",
        "AttentionType",
        "CommonAttentionMetadata",
        "MLAAttentionImpl",
        "MultipleOf",
    ],
    "vllm.v1.attention.backends.registry": ["AttentionBackendEnum", "register_backend"],
    "vllm.v1.attention.backends.mla.prefill.base": ["MLAPrefillBackend"],
    "vllm.v1.attention.backends.mla.prefill.registry": [
        "MLAPrefillBackendEnum",
        "register_mla_prefill_backend",
    ],
    "vllm.model_executor.layers.attention.mla_attention": [
        "MLACommonBackend",
        "MLACommonBaseImpl",
        "MLACommonDecodeMetadata",
        "MLACommonImpl",
        "MLACommonMetadata",
        "MLACommonMetadataBuilder",
        "MLACommonPrefillMetadata",
        "QueryLenSupport",
    ],
}


def sources(package: Path) -> tuple[str, dict[str, str]]:
    """The version of a wheel, an sdist or an unpacked folder, and the source of each wanted
    module."""
    files = {f"{module.replace('.', '/')}.py": module for module in WANTED}
    found, version = {}, ""
    for name, read in _files(package):
        inner = name[name.find("vllm/") :]
        if inner in files and name in (inner, name.partition("/")[0] + "/" + inner):
            found[files[inner]] = read().decode()
        if name.endswith(("METADATA", "PKG-INFO")) and not version:
            lines = read().decode().splitlines()
            version = next(x.partition(": ")[2] for x in lines if x.startswith("Version: "))
    missing = set(WANTED) - set(found)
    if missing:
        raise SystemExit(f"{package} has no {', '.join(sorted(missing))}")
    return version, found


def _files(package: Path) -> Iterator[tuple]:
    """(name, a function that reads it) of each file."""
    if package.is_dir():
        for path in package.rglob("*"):
            if path.is_file():
                yield path.relative_to(package).as_posix(), path.read_bytes
    elif package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            for name in archive.namelist():
                yield name, lambda name=name: archive.read(name)
    else:
        with tarfile.open(package) as archive:
            for member in archive:
                yield member.name, lambda m=member: (archive.extractfile(m) or io.BytesIO()).read()


def facts(node: ast.AST) -> str | dict:
    """What is recorded of a class, a function or a variable."""
    if isinstance(node, ast.ClassDef):
        return _class(node)
    return signature(node) if isinstance(node, ast.FunctionDef) else "variable"


def _class(node: ast.ClassDef) -> dict:
    """fields: of a dataclass. attributes: of the class itself. Each with its default, as Python
    spells it, ... where that is computed, and None where there is none."""
    marks = [ast.unparse(mark).partition("(")[0] for mark in node.decorator_list]
    made: dict = {"bases": [_base(base) for base in node.bases]}
    made |= {"fields": {}, "attributes": {}, "methods": {}, "classes": {}}
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            made["methods"][part.name] = signature(part)
        elif isinstance(part, ast.ClassDef):
            made["classes"][part.name] = _class(part)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            is_field = "dataclass" in marks and "ClassVar" not in ast.unparse(part.annotation)
            place = made["fields" if is_field else "attributes"]
            place[part.target.id] = None if part.value is None else _plain(part.value)
        elif isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
            made["attributes"][part.targets[0].id] = _plain(part.value)
    return {name: value for name, value in made.items() if value or name == "bases"}


def _base(node: ast.expr) -> str:
    """Its name; [] follows where it is given types."""
    name, types, _ = ast.unparse(node).partition("[")
    return f"{name}[]" if types else name


def _plain(node: ast.expr) -> str:
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return "..."


def signature(node: ast.FunctionDef) -> str:
    """The parameters of a function as Python spells them, after its marks, without annotations."""
    given = node.args
    for one in ast.walk(given):
        if isinstance(one, ast.arg):
            one.annotation = None
    given.defaults = [_constant(x) for x in given.defaults]
    given.kw_defaults = [x and _constant(x) for x in given.kw_defaults]
    marks = [f"@{m} " for m in map(ast.unparse, node.decorator_list) if m in _MARKS]
    return "".join(marks) + ast.unparse(given)


def _constant(node: ast.expr) -> ast.expr:
    return node if isinstance(node, ast.Constant) else ast.Constant(...)


_MARKS = {"abstractmethod", "classmethod", "property", "staticmethod"}


def recorded(package: Path) -> dict:
    """The recording of a package."""
    version, modules = sources(package)
    made: dict = {"version": version, "modules": {}}
    for module, names in WANTED.items():
        found = {}
        for node in ast.walk(ast.parse(modules[module])):
            name = getattr(node, "name", None)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            if name in names and name not in found:
                found[name] = facts(node)
        missing = set(names) - set(found)
        if missing:
            raise SystemExit(f"{module} has no {', '.join(sorted(missing))}")
        made["modules"][module] = {name: found[name] for name in names}
    return made


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    RECORDING.write_text(json.dumps(recorded(Path(sys.argv[1])), indent=1) + "\n")
    print(f"wrote {RECORDING}")


if __name__ == "__main__":
    main()
