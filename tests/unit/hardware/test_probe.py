"""The probe: container limits, cache, disks, and one real run on the CPU."""

import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest
import torch

from megatrain.errors import DeviceUnavailable, NotEnoughMemory, SettingsError
from megatrain.hardware import cgroups, measure, probe
from megatrain.hardware.machine import TOUCHED, Disk, Machine, striped

GIB = 1 << 30


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatrain"


class Group:
    """A made-up /sys/fs/cgroup and /proc/self/cgroup."""

    def __init__(self, folder):
        self.root, self.membership = folder / "cgroup", folder / "self"
        self.root.mkdir()
        self.membership.write_text("")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    @property
    def memory(self):
        return probe.memory_limit(self.root, self.membership)

    @property
    def quota(self):
        return probe.cpu_quota(self.root, self.membership)


@pytest.fixture
def group(tmp_path):
    return Group(tmp_path)


def test_no_cgroups(tmp_path, group):
    assert (group.memory, group.quota) == (None, None)
    nowhere = tmp_path / "nowhere"
    assert probe.memory_limit(nowhere, nowhere) is None
    assert probe.usable_ram(nowhere, nowhere) == probe.psutil.virtual_memory().total
    assert probe.usable_cores(nowhere, nowhere) == cgroups.affinity()


def test_v2_uses_the_tightest_limit_of_all_parents(group):
    group.membership.write_text("0::/outer/inner\n")
    group.write("outer/inner/memory.max", "max\n")
    group.write("outer/inner/cpu.max", "max 100000\n")
    assert (group.memory, group.quota) == (None, None)
    group.write("outer/memory.max", f"{8 * GIB}\n")
    group.write("outer/cpu.max", "250000 100000\n")
    assert (group.memory, group.quota) == (8 * GIB, 2.5)
    group.write("memory.max", f"{4 * GIB}\n")
    group.write("outer/inner/cpu.max", "50000 100000\n")
    assert (group.memory, group.quota) == (4 * GIB, 0.5)


def test_v2_of_a_container_that_sees_its_group_as_the_root(group):
    group.membership.write_text("0::/\n")
    group.write("memory.max", f"{GIB}\n")
    group.write("cpu.max", "300000 100000\n")
    assert (group.memory, group.quota) == (GIB, 3.0)


def test_v1_limits(group):
    group.membership.write_text("5:cpu,cpuacct:/box\n4:memory:/a/box\n2:devices:/other\n0::/\n")
    group.write("memory/a/box/memory.limit_in_bytes", "9223372036854771712\n")
    group.write("cpu,cpuacct/box/cpu.cfs_quota_us", "-1\n")
    group.write("cpu,cpuacct/box/cpu.cfs_period_us", "100000\n")
    assert (group.memory, group.quota) == (None, None)
    group.write("memory/a/memory.limit_in_bytes", f"{3 * GIB}\n")
    group.write("cpu,cpuacct/box/cpu.cfs_quota_us", "150000\n")
    assert (group.memory, group.quota) == (3 * GIB, 1.5)
    # The path is the host's and does not exist in the container: the mount itself is the group.
    group.membership.write_text("5:cpu,cpuacct:/gone\n4:memory:/gone\n")
    group.write("memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    group.write("cpu/cpu.cfs_quota_us", "400000\n")
    group.write("cpu/cpu.cfs_period_us", "100000\n")
    assert (group.memory, group.quota) == (2 * GIB, 4.0)


def test_container_limits_cap_the_hosts_memory_and_cores(group):
    group.membership.write_text("0::/\n")
    group.write("memory.max", str(1 << 20))
    group.write("cpu.max", "50000 100000")
    assert probe.usable_ram(group.root, group.membership) == 1 << 20
    assert probe.usable_cores(group.root, group.membership) == 1  # half a core still means one thread
    group.write("memory.max", str(1 << 59))
    group.write("cpu.max", "100000000 100000")
    assert probe.usable_ram(group.root, group.membership) == probe.psutil.virtual_memory().total
    assert probe.usable_cores(group.root, group.membership) == cgroups.affinity()


class Counted:
    """Fake measurements that take no time and record their calls."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(measure, "host_streams", lambda nbytes: (None, 0))
        self.fake(monkeypatch, "rate", 26e9)
        self.fake(monkeypatch, "matmul", 1e12)
        self.fake(monkeypatch, "attention", 1e11)
        self.fake(monkeypatch, "disk", (3e9, 2e9, True))

    def fake(self, monkeypatch, name, result):
        def measured(*arguments):
            self.calls.append(name)
            return result

        monkeypatch.setattr(measure, name, measured)

    def taken(self):
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


EVERYTHING = ["rate", "matmul", "matmul", "attention"]


def test_second_probe_measures_nothing(counted, own_cache, announced):
    first = probe.probe(device="cpu")
    assert counted.taken() == EVERYTHING
    assert probe.probe(device="cpu") == first
    assert counted.taken() == []
    assert probe.probe(device="cpu", refresh=True) == first
    assert counted.taken() == EVERYTHING
    assert len(list(own_cache.iterdir())) == 1
    start, done, known, *again = announced.messages
    assert start.startswith("measuring this machine")
    assert "(measured in" in done
    assert "(measured before)" in known
    assert len(again) == 2


def test_estimates(counted):
    machine = probe.probe(device="cpu")
    assert machine.update == {width: 26e9 / touched for width, touched in TOUCHED.items()}
    assert machine.update["fp32"] == 1e9
    assert "estimated" in machine.source


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"facts": {}}', b"null"])
def test_a_damaged_entry_is_measured_again(counted, own_cache, damage):
    whole = probe.probe(device="cpu")
    (entry,) = own_cache.iterdir()
    entry.write_bytes(damage)
    counted.taken()
    assert probe.probe(device="cpu") == whole
    assert counted.taken() == EVERYTHING
    assert probe.probe(device="cpu") == whole
    assert counted.taken() == []


@pytest.mark.parametrize("change", [{"machine": {}}, {"disks": {"a": {}}}, {"disks": 7}, {"facts": {"cpu": "another"}}])
def test_an_entry_with_wrong_contents_is_measured_again(counted, own_cache, change):
    probe.probe(device="cpu")
    (entry,) = own_cache.iterdir()
    entry.write_text(json.dumps(json.loads(entry.read_text()) | change))
    counted.taken()
    probe.probe(device="cpu")
    assert counted.taken() == EVERYTHING


@pytest.mark.parametrize(
    ("where", "name", "result"),
    [
        (probe, "cpu_model", "another CPU"),
        (probe, "usable_cores", 77),
        (probe, "memory_limit", 5 * GIB),
        (probe, "cpu_quota", 1.5),
        (torch, "__version__", "99.0"),
        (probe, "__version__", "99.0"),
    ],
)
def test_another_machine_is_measured_again(counted, own_cache, monkeypatch, where, name, result):
    probe.probe(device="cpu")
    counted.taken()
    monkeypatch.setattr(where, name, (lambda *_: result) if callable(getattr(where, name)) else result)
    monkeypatch.setattr(probe, "usable_ram", lambda: GIB)
    probe.probe(device="cpu")
    assert counted.taken() == EVERYTHING
    assert len(list(own_cache.iterdir())) == 2


def test_ram_is_read_at_every_probe(counted, monkeypatch):
    probe.probe(device="cpu")
    monkeypatch.setattr(probe, "usable_ram", lambda: 3 * GIB)
    assert probe.probe(device="cpu").ram_bytes == 3 * GIB


def test_an_unwritable_cache_is_announced_and_tolerated(counted, own_cache, announced):
    own_cache.parent.write_text("a file where a folder should be")
    machine = probe.probe(device="cpu")
    assert machine.cores >= 1
    assert any("could not be kept" in message for message in announced.messages)


def test_a_folder_in_place_of_an_entry_leaves_no_temporary_files(counted, own_cache, announced):
    probe.probe(device="cpu")
    (entry,) = own_cache.iterdir()
    entry.unlink()
    (entry / "sub").mkdir(parents=True)
    assert probe.probe(device="cpu").cores >= 1
    assert any("could not be kept" in message for message in announced.messages)
    assert [*own_cache.iterdir()] == [entry]


def test_a_user_without_a_home(counted, monkeypatch, announced):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for _ in range(2):
        assert probe.probe(device="cpu").cores >= 1
        assert counted.taken() == EVERYTHING
    assert all("no home directory" in message for message in announced.messages[1::3])


def test_disks_are_measured_once_each(counted, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    assert probe.probe(device="cpu").disks == ()
    counted.taken()
    (disk,) = probe.probe(device="cpu", offload_dir=str(first)).disks
    assert (disk.path, disk.read, disk.write) == (str(first), 3e9, 2e9)
    assert disk.free_bytes > 0
    assert counted.taken() == ["disk"]
    both = probe.probe(device="cpu", offload_dir=[first, second]).disks
    assert [disk.path for disk in both] == [str(first), str(second)]
    assert counted.taken() == ["disk"]
    assert probe.probe(device="cpu", offload_dir=second).disks[0].path == str(second)
    assert probe.probe(device="cpu").disks == ()
    assert counted.taken() == []


def test_directories_on_one_file_system_are_known_to_share_it(counted, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b", Path("/dev/shm")]
    for folder in folders[:2]:
        folder.mkdir()
    first, second, other = probe.probe(device="cpu", offload_dir=folders).disks
    assert first.file_system == second.file_system != other.file_system
    assert striped([first, second], "read") == 3e9


@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize("name", ["wwid", "device/wwid", "dm/uuid", "serial"])
def test_a_drive_has_the_same_name_after_a_restart(tmp_path, name, partition):
    """Its number and the name of its device may change."""
    names = []
    for device in ("nvme0n1", "nvme1n1"):
        (tmp_path / device / name).parent.mkdir(parents=True)
        (tmp_path / device / name).write_text("eui.0025385b11b2c3d4 \n")
        (tmp_path / device / f"{device}p1").mkdir()
        (tmp_path / device / f"{device}p1" / "partition").write_text("1\n")
        names.append(probe._drive(tmp_path / device / (f"{device}p1" if partition else "")))
    assert names == ["eui.0025385b11b2c3d4"] * 2
    assert probe._drive(tmp_path / "missing") == ""


def test_without_a_serial_number_a_directory_is_known_by_what_is_mounted(tmp_path):
    assert probe._mounted(Path("/proc/self")).startswith("proc ")
    (tmp_path / "a directory").mkdir()
    assert probe._mounted(tmp_path / "a directory") == probe._mounted(tmp_path) != ""


def test_many_disks_share_the_time_of_a_few(counted, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(measure, "disk", lambda folder, nbytes, seconds: given.append(seconds) or (3e9, 2e9, True))
    folders = [tmp_path / f"disk{number}" for number in range(12)]
    for folder in folders:
        folder.mkdir()
    probe.probe(device="cpu", offload_dir=folders[0])
    assert given == [probe.SECONDS["disk"]]
    found = probe.probe(device="cpu", offload_dir=[*folders, folders[3], f"{folders[4]}/"]).disks
    assert [disk.path for disk in found] == list(map(str, folders))
    assert len(given) == len(folders)
    # Each disk is written and read for this long.
    assert 2 * sum(given[1:]) <= probe.DISKS_SECONDS * (1 + 1e-9) < 10


@pytest.mark.parametrize("wrong", [5, b"/d", [None], "a\0b", ""])
def test_an_offload_dir_that_is_no_path(counted, wrong):
    with pytest.raises(SettingsError, match="offload_dir must be a directory"):
        probe.probe(device="cpu", offload_dir=wrong)


def test_update_rates_replace_estimates_and_are_kept(counted):
    estimated = probe.probe(device="cpu")
    requests = []

    def rates(device):
        requests.append(device.type)
        return {"fp32": 5e9, "8bit": 8e9}

    machine = probe.probe(device="cpu", update_rates=rates)
    assert requests == ["cpu"]
    assert machine.update == estimated.update | {"fp32": 5e9, "8bit": 8e9}
    assert "estimated" not in machine.source
    assert probe.probe(device="cpu", update_rates=rates) == machine == probe.probe(device="cpu")
    assert requests == ["cpu"]


def test_the_best_launch_rate_counts(monkeypatch):
    """Launches are measured before, between and after the rest, since the host may be busy for some seconds."""
    machine, found = Machine.load("h200-128gb"), iter([1.03e5, 1.4e5, 1.1e5])
    monkeypatch.setattr(measure, "launches", lambda *_: next(found))
    first = measure.launches(None, 0.2)
    gpu = torch.device("cuda", 0)
    between = probe._at_its_best(first, gpu)
    last = probe._with_updates(dataclasses.replace(machine, launches=between), gpu, lambda _: {})
    assert (between, last.launches) == (1.4e5, 1.4e5)


def test_unknown_widths_are_refused(counted):
    with pytest.raises(SettingsError, match="update"):
        probe.probe(device="cpu", update_rates=lambda device: {"2bit": 5e9})


def test_a_missing_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailable):
        probe.probe(device="cuda")


def test_disk_measures_a_real_disk(tmp_path):
    read, write, _ = measure.disk(tmp_path, 4 * measure.CHUNK, 5.0)
    assert read > 1e6
    assert write > 1e6
    assert list(tmp_path.iterdir()) == []


def test_disk_stops_early_and_leaves_nothing(tmp_path):
    # With no time left, each worker still makes one transfer, so there is a result.
    read, write, _ = measure.disk(tmp_path, 64 * measure.CHUNK, 0.0)
    assert read > 1e6
    assert write > 1e6
    assert list(tmp_path.iterdir()) == []


def test_disk_without_direct_io(tmp_path, monkeypatch, announced):
    really = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_DIRECT:
            os.close(really(path, flags & ~os.O_DIRECT, *mode))
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    read, write, direct = measure.disk(tmp_path, 4 * measure.CHUNK, 5.0)
    assert (min(read, write) > 1e6, direct) == (True, False)
    assert probe._measure_disk(tmp_path, 1.0).direct is False
    assert list(tmp_path.iterdir()) == []
    assert "does not support direct I/O" in announced.messages[0]


def test_a_directory_that_cannot_be_used(counted, tmp_path):
    with pytest.raises(SettingsError, match="not a directory"):
        probe.probe(device="cpu", offload_dir=tmp_path / "missing")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SettingsError, match="not a directory"):
        probe.probe(device="cpu", offload_dir=[tmp_path, file])
    assert counted.taken() == []


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    folder = Path("/proc") if os.geteuid() == 0 else locked
    free = probe.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(probe.shutil, "disk_usage", lambda folder: free)
    with pytest.raises(SettingsError, match="cannot be written"):
        probe._measure_disk(folder, 1.0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_directory_that_fills_up(tmp_path, monkeypatch, code):
    def full(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NotEnoughMemory, match=r"could not hold \d+ MiB"):
        probe._measure_disk(tmp_path, 1.0)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_little_room(tmp_path, monkeypatch):
    usage = probe.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(probe.shutil, "disk_usage", lambda folder: usage._replace(free=100 << 20))
    with pytest.raises(NotEnoughMemory, match="has 100 MiB free"):
        probe._measure_disk(tmp_path, 1.0)
    monkeypatch.setattr(probe.shutil, "disk_usage", lambda folder: usage._replace(free=200 << 20))
    assert isinstance(probe._measure_disk(tmp_path, 1.0), Disk)


def test_rate_is_amount_over_time(monkeypatch):
    class Clock:
        seconds = 0.0

        def perf_counter(self):
            return self.seconds

        def sleep(self, seconds):
            self.seconds += seconds

    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    assert measure.rate(lambda: clock.sleep(0.004), 4.0, 0.1) == pytest.approx(1000)
    calls = []
    slow = measure.rate(lambda: calls.append(clock.sleep(0.05)), 5.0, 0.01)
    assert slow == pytest.approx(100)
    assert len(calls) == 2


def test_a_real_probe_on_this_cpu(tmp_path, monkeypatch, announced):
    monkeypatch.setattr(probe, "SECONDS", dict.fromkeys(probe.SECONDS, 0.2))
    monkeypatch.setattr(probe, "DISK_FILE", 128 << 20)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    machine = probe.probe(device="cpu", offload_dir=tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert len(announced.messages) == 2
    assert machine.gpu is None
    assert 1e9 < machine.dram < 2e12
    assert 1e8 < machine.matmul["fp32"] < 1e15
    assert 1e8 < machine.attention < 1e15
    assert machine.ram_bytes <= probe.psutil.virtual_memory().total
    assert machine.disks[0].read > 1e6
    assert Machine.from_json(machine.to_json()) == machine
    assert probe.probe(device="cpu", offload_dir=tmp_path).matmul == machine.matmul
