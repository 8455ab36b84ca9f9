"""Machine descriptions are read strictly and written back unchanged, and the shipped ones are plausible."""

import copy
import dataclasses
import json
import pickle

import pytest

from megatrain.errors import SettingsError
from megatrain.hardware.machine import TOUCHED, Disk, Machine, striped

GB, GIB = 1e9, 1 << 30


def described(**changes):
    """A made-up GPU machine as parsed JSON."""
    machine = {
        "name": "made up",
        "source": "a test",
        "gpu": "NVIDIA Something",
        "vram_bytes": 80 * GIB,
        "ram_bytes": 500 * GIB,
        "cores": 32,
        "disks": [{"path": "/mnt/a", "free_bytes": 10, "read": 4e9, "write": 2e9, "direct": True, "file_system": ""}],
        "h2d": 25e9,
        "d2h": 25e9,
        "duplex": 45e9,
        "pageable_h2d": 6e9,
        "dram": 200e9,
        "dram_under_dma": 150e9,
        "matmul": {"bf16": 250e12, "tf32": 125e12, "fp32": 15e12},
        "attention": 100e12,
        "update": dict.fromkeys(TOUCHED, 7e9),
        "gpu_update": dict.fromkeys(TOUCHED, 60e9),
        "hbm": 1700e9,
        "launches": 2e5,
    }
    return machine | changes


NO_GPU = {
    "gpu": None,
    "vram_bytes": 0,
    "h2d": 0,
    "d2h": 0,
    "duplex": 0,
    "pageable_h2d": 0,
    "dram_under_dma": 0,
    "matmul": {"bf16": 1e12, "fp32": 1e12},
    "gpu_update": {},
    "hbm": 0,
    "launches": 0,
}


def read(data):
    return Machine.from_json(json.dumps(data), "here.json")


@pytest.mark.parametrize("changes", [{}, {"disks": []}, NO_GPU], ids=["gpu", "no disks", "no gpu"])
def test_round_trip(changes):
    machine = read(described(**changes))
    assert Machine.from_json(machine.to_json()) == machine
    assert json.loads(machine.to_json()) == described(**changes)
    assert all(isinstance(disk, Disk) for disk in machine.disks)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Machine)])
def test_a_missing_field_is_named(field):
    data = described()
    del data[field]
    with pytest.raises(SettingsError, match=rf"here\.json: it lacks {field}\."):
        read(data)


def test_an_unknown_field_is_named():
    with pytest.raises(SettingsError, match=r"here\.json: it has h2d_gbps, unknown here\."):
        read(described(h2d_gbps=25))
    with pytest.raises(SettingsError, match=r"here\.json: disks\[0\] lacks read and has reed, unknown here\."):
        read(described(disks=[{"path": "/mnt/a", "free_bytes": 10, "reed": 1e9, "write": 1e9}]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 7),
        ("gpu", ""),
        ("vram_bytes", 80.5),
        ("vram_bytes", 0),
        ("ram_bytes", -1),
        ("cores", True),
        ("cores", 0),
        ("disks", None),
        ("h2d", "25 GB/s"),
        ("h2d", float("nan")),
        ("h2d", 0),
        ("dram", float("inf")),
        ("hbm", -1.0),
        ("h2d", 10**400),
        ("ram_bytes", 10**400),
        ("matmul", {"bf16": 1e12}),
        ("matmul", {"bf16": 1e12, "tf32": 1e12, "fp32": 1e12, "fp8": 1e12}),
        ("matmul", [1e12]),
        ("update", {}),
        ("update", dict.fromkeys(TOUCHED, 0)),
        ("gpu_update", {"fp32": 1e9}),
        ("gpu", None),
    ],
)
def test_a_wrong_value_is_named(field, value):
    # A machine without a GPU fails at the first number that needs one.
    named = "matmul" if (field, value) == ("gpu", None) else field
    with pytest.raises(SettingsError, match=rf"here\.json: {named} must"):
        read(described(**{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("read", 0), ("write", 0.0), ("read", -1), ("free_bytes", 1.5), ("path", ""), ("path", 7), ("direct", 1)],
)
def test_a_wrong_value_of_a_disk_is_named(field, value):
    disk = {"path": "/mnt/a", "free_bytes": 10, "read": 4e9, "write": 2e9}
    with pytest.raises(SettingsError, match=rf"here\.json: {field} must"):
        read(described(disks=[disk | {field: value}]))


def test_a_machine_is_deeply_frozen():
    machine = read(described())
    for mapping in (machine.matmul, machine.update, machine.gpu_update):
        for change in (
            lambda m: m.update(bf16=1.0), lambda m: m.__setitem__("bf16", 1.0), lambda m: m.__delitem__("bf16"),
            lambda m: m.pop("bf16"), lambda m: m.popitem(), lambda m: m.clear(), lambda m: m.setdefault("fp8", 1.0),
            lambda m: m.__ior__({"bf16": 1.0}),
        ):  # fmt: skip
            with pytest.raises(TypeError, match="frozen"):
                change(mapping)
    assert machine == read(described())
    rates = dict(machine.update)
    made = dataclasses.replace(machine, update=rates)
    rates["fp32"] = 1.0
    assert made == machine


def test_a_disk_has_direct_io_unless_its_description_says_otherwise():
    disk = {"path": "/mnt/a", "free_bytes": 10, "read": 4e9, "write": 2e9}
    assert read(described(disks=[disk])) == read(described())
    assert not read(described(disks=[disk | {"direct": False}])).disks[0].direct


def test_copies_are_equal_and_have_equal_hashes():
    machine = read(described())
    copies = [copy.copy(machine), copy.deepcopy(machine), pickle.loads(pickle.dumps(machine)), read(described())]
    assert {machine, *copies} == {machine}
    assert hash(dataclasses.replace(machine, update=machine.update | {"fp32": 1.0})) != hash(machine)
    assert json.loads(json.dumps(dataclasses.asdict(machine))) == described()


@pytest.mark.parametrize("text", ["", "{", "[]", "7", None, b"\xff", "[" * 100_000, "9" * 10_000])
def test_text_that_is_not_a_description_is_refused(text):
    with pytest.raises(SettingsError, match=r"here\.json"):
        Machine.from_json(text, "here.json")


def test_load_by_path(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(described()))
    assert Machine.load(path) == Machine.load(str(path)) == read(described())
    path.write_text(json.dumps(described(cores=0)))
    with pytest.raises(SettingsError, match=r"mine\.json: cores"):
        Machine.load(path)


def test_loading_an_unknown_machine_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"'h300'.*h200-128gb"):
        Machine.load("h300")
    for path in (tmp_path, "a\0b", "~nobody-of-this-name/machine.json"):
        with pytest.raises(SettingsError, match="neither a JSON file"):
            Machine.load(path)
    with pytest.raises(SettingsError, match="a Machine, not bytes"):
        Machine.load(b"h200-128gb")


def test_list_of_shipped_machines():
    assert Machine.shipped() == ["a100-80gb", "gh200", "h100-512gb", "h200-1.5tb", "h200-128gb", "rtx4090-64gb"]


@pytest.mark.parametrize("name", Machine.shipped())
def test_shipped_machines_are_plausible(name):
    machine = Machine.load(name)
    assert machine.name == name
    assert machine.source.startswith(("measured 2026-11", "specification × measured efficiency"))
    assert machine.gpu is not None
    assert 20 * GB < machine.vram_bytes < 200 * GB
    assert 60 * GIB < machine.ram_bytes < 2048 * GIB
    assert machine.pageable_h2d < machine.h2d <= machine.dram < machine.hbm
    assert machine.d2h <= machine.h2d <= machine.duplex <= machine.h2d + machine.d2h
    assert machine.dram_under_dma < machine.dram
    assert machine.matmul["fp32"] < machine.matmul["tf32"] < machine.matmul["bf16"] < 1e15
    assert machine.attention < machine.matmul["bf16"]
    assert machine.update["fp32"] == min(machine.update.values())
    for rates, memory in ((machine.update, machine.dram), (machine.gpu_update, machine.hbm)):
        for width, touched in TOUCHED.items():
            assert rates[width] * touched < 1.05 * memory


def test_shipped_machines_are_consistent_with_each_other():
    small, large = Machine.load("rtx4090-64gb"), Machine.load("h200-1.5tb")
    for name in ("vram_bytes", "ram_bytes", "cores", "h2d", "duplex", "dram", "dram_under_dma", "attention", "hbm"):
        assert getattr(small, name) < getattr(large, name)
    assert max(Machine.shipped(), key=lambda name: Machine.load(name).h2d) == "gh200"
    ours, same = Machine.load("h200-128gb"), Machine.load("h200-1.5tb")
    assert (ours.gpu, ours.vram_bytes, ours.matmul, ours.h2d) == (same.gpu, same.vram_bytes, same.matmul, same.h2d)


def test_the_slowest_and_the_fullest_of_several_directories_bounds_all() -> None:
    """They get equal shares of everything."""

    def disk(free: int, read: float, file_system: str = "") -> Disk:
        return Disk(path="/d", free_bytes=free, read=read, write=1.0, file_system=file_system)

    assert striped([], "free_bytes") == 0
    assert striped([disk(100, 6.0)], "free_bytes") == 100
    unequal = [disk(100, 6.0), disk(30, 8.0), disk(70, 2.0)]
    assert striped(unequal, "free_bytes") == 90
    assert striped(unequal, "read") == 6.0
    # Two directories share what one has, and a third one has its own.
    shared = [disk(100, 6.0, "8:1"), disk(100, 6.0, "8:1"), disk(45, 4.0, "8:2")]
    assert striped(shared[:2], "free_bytes") == 100
    assert striped(shared, "free_bytes") == 135
    assert striped(shared, "read") == 9.0
