"""The stand-in for CUDA: what it refuses, its library without torch, and its changes of Triton's interpreter.

A model runs on it where PyTorch's CUDA build is installed (docs/add-a-kernel.md); these tests need none.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from plait.config import EngineConfig
from plait.llm.outputs import CompletionOutput, Logprob, RequestOutput
from plait.loading.open_model import kv_dtype

triton = pytest.importorskip("triton", reason="Triton is not installed here")
import triton.language as tl  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tools" / "cuda_stand_in"
PACKAGE = "cuda_stand_in"
NOT_READY, LAUNCH_FAILURE = 600, 719  # errors of CUDA's runtime, as all of these
NOT_PERMITTED, INVALIDATED, UNJOINED, OF_CAPTURE = 900, 901, 904, 907
NON_BLOCKING, GLOBAL_MODE, ANY_KIND = 1, 0, 4
BYTES = 4096
Handle = ctypes.c_void_p

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="the stand-in for CUDA runs on Linux")


@pytest.fixture(scope="module", autouse=True)
def package() -> Iterator[None]:
    """The folder as `cuda_stand_in`, as the processes of a run have it."""
    spec = importlib.util.spec_from_file_location(
        PACKAGE, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def build(package: None) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.build")


# What it refuses


def write_torch_version(folder: Path, version: str, cuda: str | None) -> None:
    """What torch keeps in its own folder."""
    (folder / "version.py").write_text(f"cuda, __version__ = {cuda!r}, {version!r}\n")


def test_a_torch_without_cuda_is_refused(build: ModuleType, tmp_path: Path) -> None:
    write_torch_version(tmp_path, "2.13.0+cpu", None)
    with pytest.raises(build.StandInRefused, match=r"2\.13\.0\+cpu.*is built without CUDA"):
        build.find_runtime(tmp_path)
    write_torch_version(tmp_path, "2.13.0+cu130", "13.0")
    with pytest.raises(build.StandInRefused, match=r"no libcudart\.so\.13 lies next to torch"):
        build.find_runtime(tmp_path)


def test_the_runtime_that_torch_loads_is_found(build: ModuleType, tmp_path: Path) -> None:
    torch_folder, library = tmp_path / "torch", tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    torch_folder.mkdir()
    write_torch_version(torch_folder, "2.13.0+cu130", "13.0")
    assert build.find_runtime(torch_folder) == library


def test_headers_of_another_cuda_are_refused(build: ModuleType) -> None:
    folder = build.find_package("triton")
    text = (folder / "backends" / "nvidia" / "include" / "cuda_runtime_api.h").read_text()
    major, other = (12, 13) if "#define CUDART_VERSION  12" in text else (13, 12)
    assert build.find_headers(folder, Path(f"libcudart.so.{major}")).is_dir()
    with pytest.raises(
        build.StandInRefused, match=rf"libcudart\.so\.{other}, and Triton brings .* CUDA {major}"
    ):
        build.find_headers(folder, Path(f"libcudart.so.{other}"))


def test_a_machine_with_a_driver_is_refused(build: ModuleType, tmp_path: Path) -> None:
    sign = tmp_path / "nvidiactl"
    assert build.why_unusable([str(sign)]) is None
    sign.touch()
    assert "has an NVIDIA driver" in build.why_unusable([str(sign)])


def test_a_machine_without_a_compiler_is_refused(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.StandInRefused, match=r"no C\+\+ compiler .* was found \(c\+\+, g\+\+"):
        build.find_compiler()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_the_command_says_what_it_needs() -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, str(FOLDER / "run.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        return done.stderr

    assert "is built without CUDA" in run("--", "info", "model")
    assert "name a command of plait behind --" in run("--lazy")


# Its command, and its hook


@pytest.fixture(scope="module")
def command(package: None) -> ModuleType:
    before = sys.path[:]
    found = importlib.import_module(f"{PACKAGE}.run")
    sys.path[:] = before  # it is a script, too, and finds its own folder
    return found


def test_the_environment_of_a_run_keeps_what_was_there(command: ModuleType, tmp_path: Path) -> None:
    options, arguments = command.parse(["--lazy", "--memory", str(1 << 30), "--", "info", "--", "x"])
    assert arguments == ["info", "--", "x"]
    given = {"LD_PRELOAD": "libmine.so", "TRITON_INTERPRET": "1", "HOME": "h"}
    made = command.make_environment(given, options, tmp_path, "libcudart.so.13", tmp_path / "complaints")
    assert made["LD_PRELOAD"] == "libcuda.so.1:libcudart.so.13:libmine.so"
    assert made["LD_LIBRARY_PATH"] == str(tmp_path)
    assert (made["CUDA_STAND_IN_LAZY"], made["CUDA_STAND_IN_MEMORY"]) == ("1", str(1 << 30))
    assert made["HOME"] == "h"
    assert "TRITON_INTERPRET" not in made


def test_a_complaint_is_printed_once_with_how_often_it_came(command: ModuleType) -> None:
    assert command.describe("") == []
    text = "".join(f"{one}\0\n" for one in ("a", "two\nlines", "a"))
    assert command.describe(text)[1:] == ["the stand-in for CUDA complains:", "2 times: a", "two\nlines"]


def test_a_comparison_names_tokens_and_log_probabilities_that_differ(package: None) -> None:
    compare = importlib.import_module(f"{PACKAGE}.compare")
    assert compare.read_options(["kv_dtype=int8", "max_num_seqs=3", "a=b"]) == (
        {"kv_dtype": "int8", "max_num_seqs": 3},
        ["a=b"],
    )

    for own in (compare.REFERENCE, {"device": "cuda"}):
        config = EngineConfig(**compare.SMALL | own)
        assert kv_dtype(config, ["int32"], torch.float32) == "float32", "a rounding of one side alone"

    def reply(*tokens: int, off: float = 0.0) -> RequestOutput:
        scores = [{token: Logprob(off - 1.0, 1, "")} for token in tokens]
        return RequestOutput("", None, [], [CompletionOutput(0, "", list(tokens), scores)])

    found = compare.find_differences
    assert list(found([reply(5, 6)], [reply(5, 6, off=1e-4)])) == []
    assert list(found([reply(5, 6)], [reply(5, 7)])) == ["request 0, token 1: [5, 6], not [5, 7]"]
    assert list(found([reply(5)], [reply(5, off=0.5)])) == ["request 0: a log-probability is 0.5 off"]


def test_its_python_has_the_packages_of_this_one_and_the_hook(build: ModuleType, tmp_path: Path) -> None:
    build.build_python(tmp_path)
    code = "import stand_in_hook, msgspec, sys; print('cuda_stand_in' in sys.modules, msgspec.__file__)"
    python = [str(tmp_path / build.PYTHON), "-I", "-c", code]
    msgspec = importlib.import_module("msgspec").__file__
    for name, expected in (("CUDA_STAND_IN_COMPLAINTS", "True"), ("OTHER", "False")):
        done = subprocess.run(python, capture_output=True, text=True, check=False, env={name: "x"})
        assert done.stdout.split() == [expected, msgspec], done.stderr


def test_the_hook_changes_a_package_after_its_import_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("hook", FOLDER / "in_children" / "stand_in_hook.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    (tmp_path / "changed_package.py").write_text("value = 1\n")
    change = ModuleType(f"{PACKAGE}.change")
    found: list[int] = []
    change.install = lambda: found.append(sys.modules["changed_package"].value)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, change.__name__, change)
    monkeypatch.setattr(hook, "CHANGES", {"changed_package": "change"})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [hook.ImportWatcher(), *sys.meta_path])
    assert importlib.util.find_spec("changed_package") is not None
    assert found == [], "only a question for it"
    importlib.import_module("changed_package")
    assert found == [1]
    del sys.modules["changed_package"]


# Its library


@pytest.fixture(scope="module")
def library(build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime without torch's stubs."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))) or shutil.which("nm") is None:
        pytest.skip("no C++ compiler is installed here")
    folder = tmp_path_factory.mktemp("stand_in")
    headers = build.find_package("triton") / "backends" / "nvidia" / "include"
    parts = build.Parts(build.find_compiler(), Path("libcudart.so.13"), (), headers, "")
    runtime: Path = build.build_runtime(parts, folder)
    build.build_driver(parts, folder, runtime)
    return runtime


class Runtime:
    """A lazy device of its own: the library has its state in variables, so each test loads a copy."""

    def __init__(self, library: Path, folder: Path) -> None:
        # Bound to itself first: in a torch with CUDA there is another library with these names.
        own = getattr(os, "RTLD_DEEPBIND", 0) | os.RTLD_NOW
        self._library = ctypes.CDLL(shutil.copy(library, folder / "libcudart.so"), mode=own)
        self._complaints = Path(os.environ["CUDA_STAND_IN_COMPLAINTS"])

    def call(self, name: str, *arguments: object) -> int:
        """The error code of a call. Numbers are sizes."""
        given = [ctypes.c_size_t(a) if isinstance(a, int) else a for a in arguments]
        code: int = getattr(self._library, name)(*given)
        return code

    def make(self, name: str, *arguments: object) -> Handle:
        """What a call writes to its first argument."""
        made = Handle()
        assert self.call(name, ctypes.byref(made), *arguments) == 0
        return made

    def stream(self) -> Handle:
        return self.make("cudaStreamCreateWithFlags", NON_BLOCKING)

    def device_memory(self) -> Handle:
        return self.make("cudaMalloc", BYTES)

    def pinned(self, letter: str) -> Handle:
        made = self.make("cudaHostAlloc", BYTES, 0)
        ctypes.memset(made, ord(letter), BYTES)
        return made

    def copy(self, to: Handle, source: Handle, stream: Handle) -> int:
        return self.call("cudaMemcpyAsync", to, source, BYTES, ANY_KIND, stream)

    def complaints(self) -> str:
        """Those since the last call of this."""
        text = self._complaints.read_text() if self._complaints.exists() else ""
        self._complaints.unlink(missing_ok=True)
        return text


@pytest.fixture
def runtime(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setenv("CUDA_STAND_IN_LAZY", "1")
    monkeypatch.setenv("CUDA_STAND_IN_COMPLAINTS", str(tmp_path / "complaints"))
    return Runtime(library, tmp_path)


def letter(address: Handle) -> str:
    """What a block is filled with."""
    text = ctypes.string_at(address, BYTES)
    assert text == text[:1] * BYTES
    return text[:1].decode("latin-1")


def test_a_copy_reads_pinned_memory_when_it_runs_and_pageable_memory_at_once(runtime: Runtime) -> None:
    stream, target, pinned = runtime.stream(), runtime.device_memory(), runtime.pinned("a")
    assert runtime.copy(target, pinned, stream) == 0
    assert letter(target) == "\xff", "nothing waits for the copy yet"
    ctypes.memset(pinned, ord("b"), BYTES)
    assert runtime.call("cudaStreamSynchronize", stream) == 0
    assert letter(target) == "b"
    pageable = ctypes.create_string_buffer(b"c" * BYTES, BYTES)
    assert runtime.copy(target, ctypes.cast(pageable, Handle), stream) == 0
    pageable.raw = b"d" * BYTES
    assert runtime.call("cudaStreamSynchronize", stream) == 0
    assert letter(target) == "c"
    assert runtime.complaints() == ""


def test_a_stream_waits_for_an_event_of_another(runtime: Runtime) -> None:
    first, second, event = runtime.stream(), runtime.stream(), runtime.make("cudaEventCreateWithFlags", 0)
    source, target = runtime.device_memory(), runtime.device_memory()
    assert runtime.copy(source, runtime.pinned("e"), first) == 0
    assert runtime.call("cudaEventRecord", event, first) == 0
    assert runtime.call("cudaEventQuery", event) == NOT_READY
    assert runtime.call("cudaStreamWaitEvent", second, event, 0) == 0
    assert runtime.copy(target, source, second) == 0
    assert runtime.call("cudaStreamSynchronize", second) == 0
    assert letter(target) == "e"
    assert runtime.call("cudaEventQuery", event) == 0


def test_a_copy_without_that_wait_reads_what_was_there_before(runtime: Runtime) -> None:
    first, second = runtime.stream(), runtime.stream()
    source, target = runtime.device_memory(), runtime.device_memory()
    assert runtime.copy(source, runtime.pinned("f"), first) == 0
    assert runtime.copy(target, source, second) == 0
    assert runtime.call("cudaStreamSynchronize", second) == 0
    assert letter(target) == "\xff"


def capture(runtime: Runtime, stream: Handle) -> None:
    assert runtime.call("cudaStreamBeginCapture", stream, GLOBAL_MODE) == 0


def end_capture(runtime: Runtime, stream: Handle) -> tuple[int, Handle]:
    graph = Handle()
    return runtime.call("cudaStreamEndCapture", stream, ctypes.byref(graph)), graph


def test_a_graph_runs_its_work_at_each_launch(runtime: Runtime) -> None:
    stream, target, pinned = runtime.stream(), runtime.device_memory(), runtime.pinned("g")
    capture(runtime, stream)
    assert runtime.copy(target, pinned, stream) == 0
    code, graph = end_capture(runtime, stream)
    assert code == 0
    executable = runtime.make("cudaGraphInstantiateWithFlags", graph, 0)
    assert runtime.call("cudaGraphDestroy", graph) == 0
    assert letter(target) == "\xff", "a capture runs nothing"
    for expected in "hi":
        ctypes.memset(pinned, ord(expected), BYTES)
        assert runtime.call("cudaGraphLaunch", executable, stream) == 0
        assert runtime.call("cudaStreamSynchronize", stream) == 0
        assert letter(target) == expected
    assert runtime.complaints() == ""


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cudaStreamSynchronize", NOT_PERMITTED),
        ("cudaEventQuery", NOT_PERMITTED),
        ("cudaDeviceSynchronize", NOT_PERMITTED),
        ("cudaMalloc", NOT_PERMITTED),
        ("a copy of pageable memory", NOT_PERMITTED),
    ],
)
def test_a_call_that_no_capture_may_have_breaks_it(runtime: Runtime, call: str, code: int) -> None:
    stream, other, target = runtime.stream(), runtime.stream(), runtime.device_memory()
    event = runtime.make("cudaEventCreateWithFlags", 0)
    capture(runtime, stream)
    arguments: dict[str, tuple[object, ...]] = {
        "cudaStreamSynchronize": (other,),
        "cudaEventQuery": (event,),
        "cudaDeviceSynchronize": (),
        "cudaMalloc": (ctypes.byref(Handle()), BYTES),
    }
    if call in arguments:
        assert runtime.call(call, *arguments[call]) == code
    else:
        pageable = ctypes.create_string_buffer(BYTES)
        assert runtime.copy(target, ctypes.cast(pageable, Handle), stream) == code
    assert end_capture(runtime, stream)[0] == INVALIDATED
    assert call in runtime.complaints()


def test_a_capture_waits_for_the_streams_that_joined_it(runtime: Runtime) -> None:
    stream, other, event = runtime.stream(), runtime.stream(), runtime.make("cudaEventCreateWithFlags", 0)
    target, pinned = runtime.device_memory(), runtime.pinned("j")
    for joins in (True, False):
        capture(runtime, stream)
        assert runtime.call("cudaEventRecord", event, stream) == 0
        assert runtime.call("cudaStreamWaitEvent", other, event, 0) == 0
        assert runtime.copy(target, pinned, other) == 0
        assert runtime.call("cudaEventRecord", event, other) == 0
        if joins:
            assert runtime.call("cudaStreamWaitEvent", stream, event, 0) == 0
        assert end_capture(runtime, stream)[0] == (0 if joins else UNJOINED)
        assert bool(runtime.complaints()) is not joins


def test_an_event_of_a_capture_is_not_waited_for(runtime: Runtime) -> None:
    stream, event = runtime.stream(), runtime.make("cudaEventCreateWithFlags", 0)
    capture(runtime, stream)
    assert runtime.call("cudaEventRecord", event, stream) == 0
    assert runtime.call("cudaEventSynchronize", event) == OF_CAPTURE
    assert end_capture(runtime, stream)[0] == INVALIDATED


def test_work_that_failed_fails_every_later_call(runtime: Runtime) -> None:
    stream = runtime.stream()
    runtime.call("stand_in_fail", ctypes.c_char_p(b"an operator failed"))
    assert runtime.call("cudaStreamSynchronize", stream) == LAUNCH_FAILURE
    assert runtime.call("cudaMalloc", ctypes.byref(Handle()), BYTES) == LAUNCH_FAILURE
    assert "an operator failed" in runtime.complaints()


# Its changes of Triton's interpreter


def bits_of(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.bfloat16).view(torch.int16)


def test_float32_rounds_to_bfloat16_as_torch_rounds_it() -> None:
    rounding = importlib.import_module(f"{PACKAGE}.rounding")
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        numbers = (upper | lower).view(torch.float32)
        numbers = numbers[~numbers.isnan()]
        found = torch.from_numpy(rounding.round_to_bfloat16(numbers.numpy())).view(torch.int16)
        assert torch.equal(found, bits_of(numbers))
        again = torch.from_numpy(rounding.widen_bfloat16(found.view(torch.uint16).numpy()))
        assert torch.equal(again, bits_of(numbers).view(torch.bfloat16).float())
    assert np.isnan(rounding.widen_bfloat16(rounding.round_to_bfloat16(np.float32([np.nan])))).all()


def test_float64_rounds_to_bfloat16_once() -> None:
    rounding = importlib.import_module(f"{PACKAGE}.rounding")
    tie = Fraction(1) + Fraction(1, 256)  # between two of bfloat16: 1 and 1 + 1/128
    near = np.array([float(tie), float(tie + Fraction(1, 2**40)), float(tie - Fraction(1, 2**40))])
    found = rounding.widen_bfloat16(rounding.round_to_bfloat16(np.concatenate([near, -near])))
    assert found.tolist() == [1.0, 1.0078125, 1.0, -1.0, -1.0078125, -1.0]


@triton.jit
def combine(a, b, total, product, larger, N: tl.constexpr):
    """Sums, products and the larger ones of two vectors, and the product of what both begin with."""
    at = tl.arange(0, N)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(total + at, x + y)
    tl.store(product + at, (x.to(tl.float32) * y.to(tl.float32)).to(tl.bfloat16))
    tl.store(larger + at, tl.where(x > y, x, -y))


@triton.jit
def multiply(a, b, out, N: tl.constexpr):
    """The product of two square matrices, in float32."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def shuffle(a, out, N: tl.constexpr, CODE: tl.constexpr):
    """Assembly over pairs of halves."""
    at = tl.arange(0, N)
    found = tl.inline_asm_elementwise(CODE, "=r,r", [tl.load(a + at)], dtype=tl.int16, is_pure=True, pack=2)
    tl.store(out + at, found)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter as triton_interpreter

    changes = importlib.import_module(f"{PACKAGE}.interpreter").make_changes()
    for name, method in changes.items():
        monkeypatch.setattr(triton_interpreter.InterpreterBuilder, name, method, raising=False)


@pytest.mark.usefixtures("interpreter")
def test_interpreted_bfloat16_is_that_of_torch() -> None:
    a, b = torch.randn(2, 256).bfloat16()
    total, product, larger = (torch.empty_like(a) for _ in range(3))
    combine[(1,)](a, b, total, product, larger, 256)
    assert torch.equal(total, a + b)
    assert torch.equal(product, (a.float() * b.float()).bfloat16())
    assert torch.equal(larger, torch.where(a > b, a, -b))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_interpreted_products_of_halves_are_summed_in_float32(dtype: torch.dtype) -> None:
    a, b, out = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype), torch.empty(16, 16)
    multiply[(1,)](a, b, out, 16)
    torch.testing.assert_close(out, a.float() @ b.float())


@pytest.mark.usefixtures("interpreter")
def test_interpreted_assembly_has_two_halves_in_a_register() -> None:
    a = torch.arange(16, dtype=torch.int16)
    out = torch.empty_like(a)
    shuffle[(1,)](a, out, 16, "prmt.b32 $0, $1, $1, 0x1032;")  # it swaps the halves
    assert out.tolist() == a.view(8, 2).flip(1).flatten().tolist()


def test_assembly_of_every_layout_runs() -> None:
    from tests.kernels.triton.test_linear import ASSEMBLED, Lanes

    ptx = importlib.import_module(f"{PACKAGE}.ptx")
    from plait.kernels.triton.linear.decode_planes import LANES, make_assembly

    assert ASSEMBLED
    words: Any = np.random.default_rng(0).integers(0, 1 << 32, (5, 1), dtype=np.uint32)
    for _, layout in ASSEMBLED:
        for dtype in (torch.bfloat16, torch.float16):
            code, count = make_assembly(layout, dtype), layout.unit // LANES
            inputs = [*words[: layout.unit * layout.bits // 256], *([words[4]] if layout.high else [])]
            found = ptx.run_assembly(code, inputs, count)
            for i in range(words.shape[1]):
                machine = Lanes(dtype, [int(word[i]) for word in inputs], count)
                machine.run(code)
                assert [int(w[i]) for w in found] == [machine.registers[f"${at}"] for at in range(count)]


def test_an_instruction_that_is_not_known_is_named() -> None:
    ptx = importlib.import_module(f"{PACKAGE}.ptx")
    with pytest.raises(NotImplementedError, match=r"does not run popc\.b32 of PTX"):
        ptx.run_assembly("{\npopc.b32 $0, $1;\n}", [np.zeros(2, np.uint32)], 1)
