"""Tries the wheel of kernels as a user has it: python tools/kernel_wheel/tries.py WHEEL KERNELS

pip installs heedful's WHEEL and that of KERNELS, from files, into a new folder. What runs after
that has this folder on its path and no checkout, and the Triton that is installed here:

--keys      the listed problems, planned for that Triton and the wheel, have the variants and
            kernels that they have with the Triton that compiled the wheel, others those that they
            have without the wheel; no GPU
--models    models of transformers as Llama and gpt-oss have them train, prefill and generate, and
            nothing is compiled; with words after it, jobs whose line has one of them
--first 9   a first call in so many fresh processes, beside torch alone and SDPA
--times SRC cases of training and prefill, beside kernels that HEEDFUL_TRITON compiles from SRC;
            in turns, in two processes
--damaged   a call beside wheels that are cut short, of another heedful, of a newer format or for
            newer drivers: one warning, and the result is right
--beside F  a folder of packages that come before those installed here: another Triton

It returns 1 if a bar is missed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
# Over what torch alone takes.
MOST_SECONDS = 0.1
MOST_RATIO = 1.01
# How a warning of a wheel that cannot be used begins.
WARNED = "kernels of the installed"
# (batch, tokens, head dim, causal, with gradients), of 32 and 8 heads.
SIZES = ((1, 4096), (2, 8192))
CASES = [(*size, *rest) for size, *rest in product(SIZES, (64, 128), (1, 0), (0, 1))]
ROUNDS = 12
FIRST = """
import json, sys, time
start = time.perf_counter()
import torch
q, k, v = (torch.randn(1, 1024, h, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8, 8))
torch.cuda.synchronize()
ready = time.perf_counter()
told = {}
if sys.argv[1] == "sdpa":
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    sdpa(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)
elif sys.argv[1] == "heedful":
    import heedful
    heedful.flash_attn_func
    told["imports"] = time.perf_counter() - ready
    heedful.flash_attn_func(q, k, v, causal=True)
torch.cuda.synchronize()
told |= {"call": time.perf_counter() - ready, "process": time.perf_counter() - start}
if sys.argv[1] == "heedful":
    told |= {"counters": dict(heedful.counters), "triton": "triton" in sys.modules}
print(json.dumps(told))
"""
TIMED = """
import json, sys, torch, heedful

def call_of(batch, tokens, dim, causal, grad):
    q, k, v = (torch.randn(batch, tokens, heads, dim, device="cuda", dtype=torch.bfloat16,
               requires_grad=bool(grad)) for heads in (32, 8, 8))
    forward = lambda: heedful.flash_attn_func(q, k, v, causal=bool(causal))
    return (lambda: torch.autograd.grad(forward(), (q, k, v), q)) if grad else forward

calls = [call_of(*case) for case in json.loads(sys.argv[1])]
for call in calls:
    for _ in range(5):
        call()
torch.cuda.synchronize()
print(json.dumps(dict(heedful.counters)), flush=True)
for line in sys.stdin:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    calls[int(line)]()
    begin.record()
    for _ in range(20):
        calls[int(line)]()
    end.record()
    end.synchronize()
    print(begin.elapsed_time(end) / 20, flush=True)
"""
DAMAGED = """
import json, warnings, torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import heedful
    q, k, v = (torch.randn(1, 1024, h, 128, device="cuda", dtype=torch.bfloat16)
               for h in (32, 8, 8))
    out = [heedful.flash_attn_func(q, k, v, causal=True) for _ in range(2)][1]
across = [t.transpose(1, 2) for t in (q, k, v)]
theirs = sdpa(*across, is_causal=True, enable_gqa=True).transpose(1, 2)
exact = sdpa(*(t.double() for t in across), is_causal=True, enable_gqa=True).transpose(1, 2)
apart = [float((each.double() - exact).norm() / exact.norm()) for each in (out, theirs)]
words = [str(each.message) for each in said if issubclass(each.category, RuntimeWarning)]
print(json.dumps({"apart": apart, "said": words, "counters": dict(heedful.counters)}))
"""


def say(words: str) -> None:
    sys.stdout.write(f"kernels: {words}\n")
    sys.stdout.flush()


def installed_in(folder: Path, *wheels: Path, beside: list[Path]) -> dict[str, str]:
    """The environment of a process that has only these, and what is beside."""
    pip = (sys.executable, "-m", "pip", "-q", "install", "--no-index", "--no-deps")
    subprocess.run([*pip, "--target", folder, *wheels], check=True)
    ours = ("PYTHONPATH", "HEEDFUL", "TRITON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join(map(str, (folder, *beside)))
    return kept | {"PYTHONPATH": path, "HEEDFUL_CACHE_DIR": str(folder / "no-cache")}


def inside(env: dict[str, str], what: str, *words: str) -> bool:
    """What `inside.py` tries in a process with the wheels."""
    command = (sys.executable, Path(__file__).with_name("inside.py"), what, *words)
    return not subprocess.run(command, env=env).returncode


def first_calls(env: dict[str, str], rounds: int) -> bool:
    """Medians of fresh processes, in turns, after one of each."""
    modes = ("torch", "sdpa", "heedful")
    told: dict[str, list[dict]] = {mode: [] for mode in modes}
    for number in range(rounds + 1):
        for mode in modes:
            command = (sys.executable, "-W", f"error:{WARNED}", "-c", FIRST, mode)
            run = subprocess.run(command, env=env, capture_output=True, text=True)
            if run.returncode:
                sys.exit(f"kernels: {mode}: {run.stderr}")
            if number:
                told[mode].append(json.loads(run.stdout.splitlines()[-1]))
    for mode, rows in told.items():
        numbers = [name for name, value in rows[0].items() if isinstance(value, float)]
        words = ", ".join(f"{n} {1e3 * median(row[n] for row in rows):.1f} ms" for n in numbers)
        say(f"{mode}: {words} {rows[0].get('counters', '')}")
    ours = told["heedful"]
    compiled = sum(row["counters"].get("compiles", 0) + row["triton"] for row in ours)
    over = median(r["call"] for r in ours) - median(r["call"] for r in told["torch"])
    say(f"a first call takes {1e3 * over:.1f} ms over torch alone, compilers met: {compiled}")
    return over <= MOST_SECONDS and not compiled


def times(env: dict[str, str], source: Path) -> bool:
    """Ratios of medians, by the wheel over compiled from the source."""
    beside = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    envs = {"wheel": env, "compiled": beside | {"PYTHONPATH": str(source)}}
    command = (sys.executable, "-c", TIMED, json.dumps(CASES))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ran = {name: subprocess.Popen(command, env=each, **pipes) for name, each in envs.items()}

    def ask(name: str, line: str = "") -> str:
        process = ran[name]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline()

    for name in ran:
        say(f"{name}: {ask(name).strip()}")
    worst = 0.0
    for number, case in enumerate(CASES):
        found: dict[str, list[float]] = {name: [] for name in ran}
        for turn in range(ROUNDS):
            for name in list(ran)[:: 1 if turn % 2 else -1]:
                found[name].append(float(ask(name, f"{number}\n")))
        ours, theirs = (median(found[name]) for name in ran)
        worst = max(worst, ours / theirs)
        say(f"{case}: {1e3 * ours:.1f} us, {ours / theirs:.4f} of compiled here")
    for process in ran.values():
        process.kill()
    return worst <= MOST_RATIO


def damages() -> dict[str, Callable[[Path], None]]:
    """What may be wrong with a wheel of kernels, given its folder."""

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1])

    def kernels(folder: Path) -> None:
        for path in folder.glob("*.kernel"):
            cut(path)

    def told(**facts) -> Callable[[Path], None]:
        """Other facts of the manifest, or of what it says of a wheel."""

        def change(folder: Path) -> None:
            path = folder / "manifest.json"
            manifest = json.loads(path.read_bytes())
            of = manifest if "format" in facts else manifest["wheel"]
            of.update(facts)
            path.write_text(json.dumps(manifest))

        return change

    return {
        "kernels cut short": kernels,
        "a manifest cut short": lambda folder: cut(folder / "manifest.json"),
        "a newer format": told(format=99),
        "another heedful": told(heedful="99.0"),
        "newer drivers": told(cuda=99),
    }


def damaged(env: dict[str, str], folder: Path) -> bool:
    """Calls beside a damaged copy of the wheel of kernels in the folder. At most twice as far from
    exact results as SDPA's are is right."""
    good = True
    for number, (name, damage) in enumerate(damages().items()):
        site = folder / f"damaged-{number}"
        for package in folder.glob("heedful_kernels*_sm90"):
            damage(shutil.copytree(package, site / package.name))
        path = os.pathsep.join((str(site), env["PYTHONPATH"]))
        more = {"PYTHONPATH": path, "HEEDFUL_CACHE_DIR": str(folder / "cache")}
        command = (sys.executable, "-c", DAMAGED)
        run = subprocess.run(command, env=env | more, capture_output=True, text=True)
        if run.returncode:
            say(f"{name}: {run.stderr}")
            good = False
            continue
        told = json.loads(run.stdout)
        say(f"{name}: {told}")
        ours, theirs = told["apart"]
        warned = [words for words in told["said"] if words.startswith(WARNED)]
        good &= ours <= 2 * theirs and len(warned) == 1
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("wheels", type=Path, nargs=2, metavar="WHEEL")
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("--models", nargs="*", metavar="WORDS")
    parser.add_argument("--first", type=int, metavar="ROUNDS")
    parser.add_argument("--times", type=Path, metavar="SRC")
    parser.add_argument("--damaged", action="store_true")
    parser.add_argument("--beside", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="heedful-kernels-") as folder:
        env = installed_in(Path(folder), *given.wheels, beside=given.beside)
        tries: list[Callable[[], bool]] = []
        if given.keys:
            tries.append(lambda: inside(env, "keys"))
        if given.models is not None:
            tries.append(lambda: inside(env, "models", *given.models))
        if given.first:
            tries.append(lambda: first_calls(env, given.first))
        if given.times:
            tries.append(lambda: times(env, given.times))
        if given.damaged:
            tries.append(lambda: damaged(env, Path(folder)))
        sys.exit(not all([attempt() for attempt in tries]))


if __name__ == "__main__":
    main()
