"""On the GPU: forked children read pinned memory without a copy, and cannot change it."""

import os
import signal

import torch
from benchmarks.shapes import random_model
from tests import forked

import megatrain as mt
from megatrain.store.ram import HostMemory

MIB = 1 << 20
STORE = 1024 * MIB
WORKERS = 4


def private(address, nbytes):
    """Private bytes of this process in the mappings of a range, and in all mappings (Private_Clean + Private_Dirty)."""
    inside = total = 0
    within = False
    with open("/proc/self/smaps") as mappings:
        for line in mappings:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                begin, end = (int(word, 16) for word in words[0].split("-"))
                within = begin < address + nbytes and end > address
            elif words[0] in ("Private_Clean:", "Private_Dirty:"):
                total += int(words[1]) << 10
                inside += int(words[1]) << 10 if within else 0
    return inside, total


class StoreReader(torch.utils.data.Dataset):
    """Each item is computed by a worker: it reads the full store, then reports its private memory."""

    def __init__(self, model, buffer):
        self.model, self.buffer = model, buffer

    def __len__(self):
        return WORKERS

    def __getitem__(self, index):
        parameter = next(self.model.parameters())
        total = int(self.buffer.bytes.sum(dtype=torch.int64))
        inside, everything = private(self.buffer.address, self.buffer.nbytes)
        return torch.tensor([total, inside, everything, round(parameter.host().float().sum().item() * 1e3)])


def train(forks):
    """Train some steps; with `forks`, children run between and inside them. Returns losses and weights."""
    torch.manual_seed(0)
    model = random_model("tiny", torch.bfloat16, num_hidden_layers=3).train()
    generator = torch.Generator().manual_seed(1)
    found = []
    with mt.Engine(model, device="cuda") as engine:
        assert engine._memory.pinned > 0
        optimizer = engine.optimizer(lr=1e-3, max_grad_norm=1.0)
        slab = engine.slabs[0]
        for _ in range(4):
            ids = torch.randint(0, 512, (2, 96), generator=generator).cuda()
            loss = model(input_ids=ids, labels=ids).loss
            if forks:
                assert forked.run(lambda: engine.host_state_dict() and None) == forked.Ended()
            loss.backward()
            optimizer.step()
            if forks:
                # The step's updates are still pending here.
                refused = forked.run(lambda: slab.load(0, torch.zeros(slab.layout.segments[0].shape)))
                assert refused.raised is not None
                assert refused.raised[0] == "ForkedProcess"
                assert forked.run(lambda: slab.weight.fill_(1)).signal == signal.SIGSEGV
                assert forked.run(lambda: engine.close()) == forked.Ended()
            optimizer.zero_grad()
            found.append(loss.item())
        engine.synchronize()
        return found, [slab.weight.cpu().clone() for slab in engine.slabs]


def test_loader_workers_share_pinned_memory():
    """If pinned memory were a private mapping, the fork would copy its pages into every worker."""
    model = random_model("tiny", torch.bfloat16, num_hidden_layers=3).train()
    with mt.Engine(model, device="cuda") as engine:
        optimizer = engine.optimizer(lr=1e-3)
        ids = torch.randint(0, 512, (2, 96)).cuda()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        memory = HostMemory(pin=True, threads=os.cpu_count() or 1)
        buffer = memory.allocate(STORE, transferred=True)
        assert buffer.pinned
        buffer.bytes.fill_(1)
        expected = round(next(model.parameters()).host().float().sum().item() * 1e3)
        loader = torch.utils.data.DataLoader(
            StoreReader(model, buffer), num_workers=WORKERS, multiprocessing_context="fork", batch_size=1
        )
        reports = torch.cat(list(loader)).tolist()
        print(
            f"\nprivate bytes of each worker: {[report[2] // MIB for report in reports]} MiB, store: {STORE // MIB} MiB"
        )
        assert len(reports) == WORKERS
        for total, inside, everything, read in reports:
            assert total == STORE
            assert read == expected
            assert inside == 0
            assert everything < STORE // 4
        # Children do not undo the parent's registration: a copy from pinned memory is direct and correct.
        target = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        target.copy_(buffer.bytes[: 64 * MIB], non_blocking=True)
        assert int(target.sum(dtype=torch.int64)) == 64 * MIB
        memory.free(buffer)


def test_children_change_nothing(deterministic):
    losses, weights = train(forks=True)
    expected_losses, expected = train(forks=False)
    assert losses == expected_losses
    assert all(torch.equal(found, right) for found, right in zip(weights, expected, strict=True))
