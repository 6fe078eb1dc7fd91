"""One worker process: how it is started, asked and ended."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

import heedful
from heedful.core.base import settings
from heedful.core.base.installed import Compiler
from heedful.launch.code import store
from heedful.launch.code.artifact import MEMORY_HELPS, PACKS_HELP, Artifact, CompileError
from heedful.launch.code.folder import Folder
from heedful.launch.code.identity import cache_key, told, toolchain
from heedful.launch.spec import KernelCall
from heedful.launch.worker.channel import BYE, CALL, ERROR, HELLO, KERNEL, receive, send
from heedful.launch.worker.codec import encode

# The environment variables that a worker inherits, besides those that change what the compiler
# makes.
_KEPT = ("PATH", "HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
_KEPT += ("DYLD_LIBRARY_PATH", "SYSTEMROOT")
_MOST_WORDS = 4000
# A worker that has nothing to do holds a few hundred MiB.
IDLE_SECONDS = 120.0
_HERE = f"HEEDFUL_TRITON={settings.PROCESS} compiles in this process"
_BY_SIGNAL = {"SIGKILL": MEMORY_HELPS, "SIGABRT": MEMORY_HELPS}
_BY_SIGNAL |= {"SIGSYS": f"a filter of system calls forbids what it does; {PACKS_HELP}"}

# All that run, so that a forked child can close its ends of their sockets.
_running: "WeakSet[Worker]" = WeakSet()


class Ended(Exception):
    """The worker had ended before it was asked."""


class Worker:
    """A process that compiles with another Triton. It ends when this process does.

    Raises CompileError where it cannot be started, or has another Triton than is wanted.
    """

    def __init__(self, compiler: Compiler):
        self._compiler, self.toolchain = compiler, toolchain(compiler)
        self._scratch: Path | None = None
        self._process: subprocess.Popen | None = None
        self._channel: socket.socket | None = None
        _running.add(self)
        try:
            # Native code is loaded from there.
            Folder(compiler.root, private=False).__exit__()
            self._scratch = Path(tempfile.mkdtemp(prefix="heedful-worker-"))
            self._channel, theirs = socket.socketpair()
            with theirs:
                self._process = self._start(theirs)
            self._greet(self._channel)
        except BaseException as error:
            text = self._why_not(error)
            self.end()
            if not isinstance(error, OSError | EOFError):
                raise
            raise CompileError(
                f"no worker process could be started with {compiler.words()}: {text}; `heedful"
                f" toolchain list` shows others, {_HERE}, {PACKS_HELP}"
            ) from None

    def _why_not(self, error: BaseException) -> str:
        """Why the process was not started; if a signal ended it, that says more than an error
        here."""
        if isinstance(error, TimeoutError):
            return "it took too long"
        if isinstance(error, EOFError | ConnectionError) and self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                if self._process.wait(10) < 0:
                    return f"it {self._fate()}"
        return f"{error}{self._last_words()}"

    def _start(self, theirs: socket.socket) -> subprocess.Popen:
        if not sys.executable:
            raise OSError("this program has no Python of its own to start (sys.executable)")
        # Neither the current folder, nor the user's or the environment's packages are on its path.
        package = str(Path(heedful.__file__).parents[1])
        # Bytecode that limits cut short would stay in the package.
        command = [sys.executable, "-B", "-P", "-s", "-S", "-m", "heedful.launch.worker"]
        assert self._scratch is not None
        with open(self._scratch / "said", "wb") as said:
            return subprocess.Popen(
                [*command, str(theirs.fileno()), str(IDLE_SECONDS), str(self._scratch)],
                env=self._environment(os.pathsep.join([str(self._compiler.root), package])),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                # A group of its own: signals of the terminal are this process's to handle.
                start_new_session=True,
            )

    def _environment(self, path: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        scratch = str(self._scratch)
        more = {"PYTHONPATH": path, "PYTHONUTF8": "1", "HEEDFUL_TRITON": settings.PROCESS}
        more |= dict.fromkeys(("TMPDIR", "TRITON_CACHE_DIR", "TRITON_HOME"), scratch)
        return kept | told() | more

    def _greet(self, channel: socket.socket) -> None:
        kind, data = receive(channel, self._deadline())
        if kind != HELLO or data.decode() != self.toolchain:
            raise OSError(f"it found {data.decode()!r}, wanted {self.toolchain!r}")

    def _deadline(self) -> float:
        return time.monotonic() + settings.get("compile_seconds")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def compile(self, call: KernelCall, arch: str) -> Artifact:
        """The compiled kernel. Raises CompileError with the kernel's name and advice; Ended if the
        worker had ended before. After any error but the compiler's the worker has ended."""
        name, is_well = f"{call.kernel.function} for {arch}", False
        request, channel = encode(call, arch), self._channel
        assert channel is not None
        try:
            # Where it is gone, its last message tells.
            with suppress(ConnectionError):
                send(channel, CALL, request)
            kind, data = receive(channel, self._deadline())
            if kind == BYE:
                raise Ended
            is_well = True
        except TimeoutError:
            limit = settings.get("compile_seconds")
            raise CompileError(
                f"{name}: the worker process had not compiled it after {limit:g} s and was ended;"
                " HEEDFUL_COMPILE_SECONDS allows more"
            ) from None
        except (EOFError, OSError):
            raise CompileError(f"{name}: the worker process {self._fate()}") from None
        finally:
            if not is_well:
                self.end()
        if kind == ERROR:
            facts = json.loads(data)
            if facts["machine"]:
                # The next one may have other limits.
                self.end()
            raise CompileError(_named(name, facts["text"]))
        assert kind == KERNEL
        try:
            return store.parse(cache_key(call, arch), data)
        except store.CorruptArtifact as error:
            raise CompileError(
                f"{name}: the worker process made another kernel ({error}): heedful's files have"
                " changed since this process began, start it anew"
            ) from None

    def _fate(self) -> str:
        """How the process ended, and advice."""
        assert self._process is not None
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return f"closed its channel{self._last_words()}; {_HERE}"
        if code >= 0:
            return f"ended with {code}{self._last_words()}; {_HERE}"
        killed = signal.Signals(-code).name
        return f"was ended by {killed}{self._last_words()}; {_BY_SIGNAL.get(killed, _HERE)}"

    def _last_words(self) -> str:
        try:
            assert self._scratch is not None
            said = (self._scratch / "said").read_bytes()[-_MOST_WORDS:].decode(errors="replace")
        except (OSError, AssertionError):
            return ""
        lines = said.strip().splitlines()[-2:]
        return f", saying: {' '.join(line.strip() for line in lines)}" if lines else ""

    def end(self) -> None:
        """Ends the process, what it started, and its files."""
        self._close()
        if self._process is not None:
            # Its group outlives it, as far as it left somebody behind.
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # in the midst of a call of the system
                self._process.wait(10)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def let_go(self) -> None:
        """Closes the socket in a forked child: the worker belongs to the parent, and must see when
        the parent ends."""
        self._close()
        if self._process is not None:
            self._process.returncode = 0

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def _named(name: str, text: str) -> str:
    return text if text.startswith(name) else f"{name}: {text}"


def _after_fork() -> None:
    for worker in list(_running):
        worker.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
