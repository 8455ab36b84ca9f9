"""`megatrain.probe`: the machine, with the speed of our own updates on it."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatrain.hardware import inventory
from megatrain.hardware import probe as hardware_probe
from megatrain.hardware.machine import Machine
from megatrain.optim.rates import update_rates


def probe(*, device: str | None = None, offload_dir: Any = None, refresh: bool = False) -> Machine:
    """Describe this machine: what this process may use of it, and how fast that is, measured in under 20 seconds.

    What was measured before is read from the cache unless `refresh`. The speed of a disk is measured only for the
    directories in `offload_dir`.
    """
    rates = partial(update_rates, threads=inventory.update_threads())
    return hardware_probe.probe(device=device, offload_dir=offload_dir, refresh=refresh, update_rates=rates)
