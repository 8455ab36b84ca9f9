import ctypes
import mmap
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.errors import NativeLibraryMissing
from megatrain.native import library

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture
def fresh_loader():
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def resident_pages(mapping: mmap.mmap, nbytes: int) -> int:
    """The number of pages of a mapping that are in memory, from mincore."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    pages = (nbytes + PAGE - 1) // PAGE
    flags = (ctypes.c_ubyte * pages)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(address, nbytes, flags) == 0
    return sum(flag & 1 for flag in flags)


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_touch_faults_in_every_page(threads):
    nbytes = 8 * MIB + 3 * PAGE
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    assert resident_pages(mapping, nbytes) == 0
    library.touch(address, nbytes, threads)
    assert resident_pages(mapping, nbytes) == nbytes // PAGE
    assert mapping[:] == bytes(nbytes)


@settings(max_examples=40, deadline=None)
@given(offset=st.integers(0, 2 * PAGE), nbytes=st.integers(0, 5 * MIB), threads=st.integers(1, 9))
def test_touch_keeps_contents(offset, nbytes, threads):
    data = torch.randint(0, 256, (5 * MIB + 2 * PAGE,), dtype=torch.uint8)
    before = data.clone()
    library.touch(data.data_ptr() + offset, nbytes, threads)
    assert torch.equal(data, before)


@settings(max_examples=60, deadline=None)
@given(
    nbytes=st.one_of(st.integers(0, 200), st.integers(0, 5 * MIB)),
    shift_dst=st.integers(0, 130),
    shift_src=st.integers(0, 130),
    threads=st.integers(1, 9),
)
def test_copy_moves_exactly_the_range(nbytes, shift_dst, shift_src, threads):
    src = torch.randint(0, 256, (nbytes + 200,), dtype=torch.uint8)
    dst = torch.full((nbytes + 200,), 7, dtype=torch.uint8)
    expected = dst.clone()
    expected[shift_dst : shift_dst + nbytes] = src[shift_src : shift_src + nbytes]
    library.copy(dst.data_ptr() + shift_dst, src.data_ptr() + shift_src, nbytes, threads)
    assert torch.equal(dst, expected)


def test_refusals_are_os_errors():
    data = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(OSError, match="Invalid argument"):
        library.touch(data.data_ptr(), 8, 0)
    with pytest.raises(OSError, match="Bad address"):
        library.touch(0, 8, 1)
    with pytest.raises(OSError, match="Bad address"):
        library.copy(data.data_ptr(), 0, 8, 1)
    with pytest.raises(ValueError, match="negative"):
        library.copy(data.data_ptr(), data.data_ptr(), -1, 1)


def test_missing_library_names_places_and_command(monkeypatch, tmp_path, fresh_loader):
    places = [tmp_path / "one" / library.FILE_NAME, tmp_path / "two" / library.FILE_NAME]
    monkeypatch.setattr(library, "search_paths", lambda: places)
    with pytest.raises(NativeLibraryMissing) as caught:
        library.touch(0, 0, 1)
    message = str(caught.value)
    assert all(str(place) in message for place in places)
    assert "cmake -S . -B build && cmake --build build" in message
    assert "make native" in message


def test_explicit_path_is_the_only_one_searched(monkeypatch, tmp_path, fresh_loader):
    explicit = tmp_path / "libother.so"
    monkeypatch.setenv(library.PATH_VARIABLE, str(explicit))
    assert library.search_paths() == [explicit]
    with pytest.raises(NativeLibraryMissing, match=r"libother\.so"):
        library.touch(0, 0, 1)


def test_a_file_that_is_not_a_library_is_refused(monkeypatch, tmp_path, fresh_loader):
    explicit = tmp_path / library.FILE_NAME
    explicit.write_text("not a library")
    monkeypatch.setenv(library.PATH_VARIABLE, str(explicit))
    with pytest.raises(NativeLibraryMissing, match="cannot be loaded"):
        library.touch(0, 0, 1)


def test_a_different_abi_version_is_refused(monkeypatch, fresh_loader):
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    needed = library.ABI_VERSION
    with pytest.raises(NativeLibraryMissing, match=f"ABI version {needed - 1}, but MegaTrain needs {needed}"):
        library.touch(0, 0, 1)


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"proc/self/cgroup": "0::/\n"}, 0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1000 100000\n"}, 1),
        (  # the tightest limit along the path counts
            {
                "proc/self/cgroup": "0::/a/b/c\n",
                "sys/fs/cgroup/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/b/c/cpu.max": "800000 100000\n",
            },
            3,
        ),
        (  # a path of the host, seen inside a container
            {"proc/self/cgroup": "0::/host/only\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
            2,
        ),
        (  # cgroup v1, alone and with v2
            {
                "proc/self/cgroup": "9:memory:/x\n4:cpu,cpuacct:/x\n3:cpuset:/y\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/unified/cpu.max": "500000 100000\n",
            },
            3,
        ),
        ({}, 0),
    ],
)
def test_cpu_quota(tmp_path, files, cpus):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert library.cpu_quota(str(tmp_path)) == cpus


def test_instruction_sets():
    names = library.isas()
    assert names[0] == "portable"
    assert len(set(names)) == len(names)
    for name in names:
        library.use_isa(name)
    with pytest.raises(ValueError):
        library.use_isa("abacus")


def test_workers_have_names_and_stay():
    code = (
        "import os, pathlib, torch\n"
        "from megatrain.native import library\n"
        "def workers():\n"
        "    names = [p.read_text() for p in pathlib.Path('/proc/self/task').glob('*/comm')]\n"
        "    return sorted(name.strip() for name in names if name.startswith('megatrain-'))\n"
        "data, more = torch.zeros(1 << 24), torch.zeros(1 << 24)\n"
        "cpus = len(os.sched_getaffinity(0))\n"
        "cpus = min(cpus, library.cpu_quota() or cpus)\n"
        "assert workers() == []\n"
        "for _ in range(5):\n"
        "    library.copy(more.data_ptr(), data.data_ptr(), 1 << 26, 4)\n"
        "assert workers() == [f'megatrain-{n}' for n in range(min(4, cpus) - 1)], workers()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_does_not_load_it():
    code = (
        "from megatrain.native import library\n"
        "assert library.load.cache_info().currsize == 0\n"
        "assert 'libmegatrain' not in open('/proc/self/maps').read()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
