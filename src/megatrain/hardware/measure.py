"""Micro-benchmarks, one function per number. Each takes the seconds that it may spend.

Thread count, matrix precision and random generators are restored.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import math
import mmap
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from megatrain.hardware.attention import AttentionShape, requested_backend
from megatrain.telemetry.notices import warn

Work = Callable[[], object]
"""One repetition of the measured work. On a GPU it may only enqueue."""

BATCHES = 8
"""Repetitions are timed in about this many batches. The result is the median, which ignores outliers."""
CHUNK = 16 << 20
"""Bytes per disk transfer."""
IN_FLIGHT = 4
"""Concurrent disk transfers."""
LAUNCHES = 256
"""Operations in a row, fewer than the GPU's queue holds."""
SIZES = {"cpu": (256, 512, 1024, 2048, 4096), "cuda": (2048, 4096, 8192)}
"""Edges of the matrices that are multiplied."""


def rate(work: Work, amount: float, seconds: float, settle: Callable[[], None] = lambda: None) -> float:
    """`amount` per second of `work`, repeated for `seconds`. `settle` waits for enqueued work."""
    once = _once(work, settle)
    if once >= seconds:
        return amount / once
    end = time.perf_counter() + seconds - once
    batch = max(1, int(seconds / BATCHES / once))
    rates = []
    while (begun := time.perf_counter()) < end:
        for _ in range(batch):
            work()
        settle()
        rates.append(batch * amount / (time.perf_counter() - begun))
    return statistics.median(rates)


def _once(work: Work, settle: Callable[[], None]) -> float:
    """Seconds of one repetition, after a warm-up."""
    work()
    settle()
    start = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - start


@contextmanager
def threads(count: int) -> Iterator[None]:
    """PyTorch's CPU operations run on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def host_streams(nbytes: int) -> tuple[Work, int]:
    """One pass of AdamW over FP32 tensors too large for any cache, and the bytes that it moves.

    Four streams are read and three written.
    """
    count = max(1, nbytes // 16)
    weight, gradient, first, second = ([torch.ones(count, dtype=torch.float32, device="cpu")] for _ in range(4))
    step = torch.ones((), dtype=torch.float32, device="cpu")
    options = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    # torch.optim.AdamW(fused=True) calls this, but constructing one imports TorchDynamo, which takes seconds.
    update: Callable[..., None] = torch._fused_adamw_
    run = partial(update, weight, gradient, first, second, [], [step], amsgrad=False, maximize=False, **options)
    return run, 28 * count


class Link:
    """Copies between host and GPU, each direction with buffers and a stream of its own."""

    def __init__(self, device: torch.device, host_in: torch.Tensor, host_out: torch.Tensor) -> None:
        self.nbytes = min(host_in.numel(), host_out.numel())
        self._device = device
        self._host_in, self._host_out = host_in[: self.nbytes], host_out[: self.nbytes]
        self._in = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self._out = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # The buffers are zeroed on the current stream, which the other two streams do not wait for.
        self.settle()

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def send(self, source: torch.Tensor | None = None) -> None:
        """Copy to the GPU from pinned memory, or from another source of at most its size."""
        source = self._host_in if source is None else source
        with torch.cuda.stream(self._streams[0]):
            self._in[: source.numel()].copy_(source, non_blocking=True)

    def receive(self) -> None:
        with torch.cuda.stream(self._streams[1]):
            self._host_out.copy_(self._out, non_blocking=True)

    def both(self) -> None:
        self.send()
        self.receive()

    def busy(self) -> bool:
        """Whether copies are still running in both directions."""
        return not any(stream.query() for stream in self._streams)


@contextmanager
def registered(nbytes: int) -> Iterator[torch.Tensor]:
    """Registered host memory. If registration fails, a smaller buffer that PyTorch pins."""
    memory = torch.ones(nbytes, dtype=torch.uint8, device="cpu")
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0)) != 0:
        # CUDA keeps the error code, and the next kernel launch raises it. PyTorch has no call that clears it.
        with suppress(RuntimeError):
            torch.empty(1, device="cuda").fill_(0)
        del memory
        yield torch.ones(min(nbytes, 64 << 20), dtype=torch.uint8, device="cpu").pin_memory()
        return
    try:
        yield memory
    finally:
        runtime.cudaHostUnregister(memory.data_ptr())


def copies(link: Link, seconds: Mapping[str, float]) -> dict[str, float]:
    """The copy rates of `Machine`, in bytes per second."""
    pageable = torch.ones(min(link.nbytes, 256 << 20), dtype=torch.uint8, device="cpu")
    works: dict[str, tuple[Work, int]] = {
        "duplex": (link.both, 2 * link.nbytes),
        "h2d": (link.send, link.nbytes),
        "d2h": (link.receive, link.nbytes),
        "pageable_h2d": (partial(link.send, pageable), pageable.numel()),
    }
    return {name: rate(work, nbytes, seconds[name], link.settle) for name, (work, nbytes) in works.items()}


def dram_under_dma(streams: tuple[Work, int], link: Link, alone: float, copying: float, seconds: float) -> float:
    """The rate of `streams` while the link copies both ways. `alone` is its rate otherwise, `copying` the link's."""
    lasting = 1.5 * seconds + 8 * streams[1] / alone
    for _ in range(2):
        # All copies are enqueued ahead: a thread that issued them would take a core from the measured work.
        for _ in range(math.ceil(lasting * copying / (2 * link.nbytes))):
            link.both()
        measured = rate(*streams, seconds)
        outlasted = link.busy()
        link.settle()
        if outlasted:
            break
        lasting *= 4
    return measured


def hbm(device: torch.device, nbytes: int, seconds: float) -> float:
    """Bytes per second, read plus written, of a copy inside GPU memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), 2 * nbytes, seconds, _settling(device))


def launches(device: torch.device, seconds: float) -> float:
    """Operations per second that this thread can launch; the GPU takes almost no time for each."""
    value = torch.zeros(1, device=device)

    def work() -> None:
        for _ in range(LAUNCHES):
            value.add_(1.0)

    return rate(work, LAUNCHES, seconds, _settling(device))


def matmul(device: torch.device, kind: str, seconds: float) -> float:
    """FLOP per second of a square matrix product of random numbers (zeros would draw less power and run faster)."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32

    def make(size: int) -> tuple[Work, float]:
        left, right, out = _randoms(3, (size, size), device, dtype)
        return (lambda: torch.mm(left, right, out=out)), 2.0 * size**3

    with torch.no_grad(), _cuda_precision("tf32" if kind == "tf32" else "ieee"):
        return _at_the_largest(make, SIZES[device.type], device, seconds)


def attention(device: torch.device, seconds: float) -> float:
    """FLOP per second of BF16 causal attention, forward + backward, as `Machine.attention` counts them.

    It is measured with the backend that engines use.
    """
    batch, heads, dim = (4, 28, 128) if device.type == "cuda" else (1, 2, 128)

    def make(length: int) -> tuple[Work, float]:
        q, k, v, upstream = _randoms(4, (batch, heads, length, dim), device, torch.bfloat16)
        for tensor in (q, k, v):
            tensor.requires_grad_()

        def work() -> None:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), upstream)

        return work, 7.0 * batch * heads * length**2 * dim

    with torch.enable_grad(), requested_backend(device, AttentionShape(head_dim=dim, length=2048)):
        return _at_the_largest(make, (512, 2048), device, seconds)


def _at_the_largest(
    make: Callable[[int], tuple[Work, float]], sizes: Sequence[int], device: torch.device, seconds: float
) -> float:
    """The rate at the largest size that fits in `seconds`, predicted from the smaller sizes."""
    settle = _settling(device)
    for size, larger in itertools.zip_longest(sizes, sizes[1:]):
        work, amount = make(size)
        if larger is None or _once(work, settle) * (larger / size) ** 3 > seconds:
            break
    return rate(work, amount, seconds, settle)


def _settling(device: torch.device) -> Callable[[], None]:
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


def _randoms(count: int, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(count)]


@contextmanager
def _cuda_precision(name: str) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = name
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def disk(folder: Path, nbytes: int, seconds: float) -> tuple[float, float, bool]:
    """Read and write rates in bytes per second, measured for at most `seconds` each in an unlinked file, and whether
    that was by direct I/O."""
    descriptor = _scratch_file(folder)
    try:
        _preallocate(descriptor, nbytes)
        # Anonymous mappings are page-aligned, as direct I/O requires. The bytes are random because drives may compress.
        buffers = [mmap.mmap(-1, CHUNK) for _ in range(IN_FLIGHT)]
        for buffer in buffers:
            buffer.write(os.urandom(1 << 20) * (CHUNK >> 20))
        start = time.perf_counter()
        written = _sweep(os.pwrite, descriptor, buffers, nbytes // CHUNK, seconds)
        os.fdatasync(descriptor)
        write = written * CHUNK / (time.perf_counter() - start)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        # Chunks are written in order, so these are the first ones.
        read = _sweep(lambda file, buffer, at: os.preadv(file, [buffer], at), descriptor, buffers, written, seconds)
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT != 0
        return read * CHUNK / (time.perf_counter() - start), write, direct
    finally:
        os.close(descriptor)


def _scratch_file(folder: Path) -> int:
    """An open file without a name, which the system frees when it is closed, even by a crash."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    path = folder / f".megatrain-probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Some kernels create the file before they refuse O_DIRECT.
        path.unlink(missing_ok=True)
        warn(f"{folder} does not support direct I/O: its speed was measured through the page cache")
        descriptor = os.open(path, flags, 0o600)
    path.unlink()
    return descriptor


def _preallocate(descriptor: int, nbytes: int) -> None:
    """Allocate the file's blocks. State on disk is overwritten in place, so allocation must not be measured."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _sweep(
    transfer: Callable[[int, mmap.mmap, int], int],
    descriptor: int,
    buffers: Sequence[mmap.mmap],
    chunks: int,
    seconds: float,
) -> int:
    """Transfer chunks, one per buffer at a time, until all are done or the time is up; returns their number."""
    numbers = itertools.count()
    deadline = time.perf_counter() + seconds

    def worker(buffer: mmap.mmap) -> int:
        done = 0
        while time.perf_counter() < deadline or done == 0:
            number = next(numbers)
            if number >= chunks:
                break
            if transfer(descriptor, buffer, number * CHUNK) != CHUNK:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += 1
        return done

    with ThreadPoolExecutor(len(buffers)) as pool:
        return sum(pool.map(worker, buffers))
