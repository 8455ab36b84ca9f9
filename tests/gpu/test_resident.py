"""On the GPU: resident blocks are saved with lossless compression, and wait for the user's writes."""

import pytest
import torch
from tests.tiny import Stack, engine_of, inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_lossless_checkpoints_of_resident_blocks(tmp_path) -> None:
    """`lossless.encode` accepts only tensors in host memory."""
    engine = engine_of(Stack(), device="cuda", resident=("*",), optimizer_compression="lossless")
    optimizer = engine.optimizer(lr=0.1)
    engine.model(inputs(0).cuda()).square().mean().backward()
    optimizer.step()
    engine.save(tmp_path, optimizer)
    engine.load(tmp_path, optimizer)
    engine.close()


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8192, 8192, bias=False) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _weights(resident, touch) -> torch.Tensor:
    torch.manual_seed(0)
    engine = engine_of(Wide().bfloat16(), device="cuda", resident=resident)
    optimizer = engine.optimizer(lr=1e-2, kind="sgd")
    x = torch.ones(4, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        engine.model(x).square().mean().backward()
        touch(engine.model)
        optimizer.step()
        optimizer.zero_grad()
    engine.synchronize()
    return torch.cat([p.host().reshape(-1) for p in engine.model.parameters()])


def test_updates_of_resident_slabs_wait_for_gradients_written_by_the_user() -> None:
    def touch(model) -> None:
        torch.cuda._sleep(200_000_000)  # compute is 0.1 s behind
        for parameter in model.parameters():
            parameter.grad.mul_(0.0)

    assert torch.equal(_weights(("*",), touch), _weights((), touch))


@pytest.mark.slow
def test_sums_wait_for_the_zeros_of_their_buffer() -> None:
    torch.manual_seed(0)

    def grads(resident) -> torch.Tensor:
        torch.manual_seed(0)
        engine = engine_of(Wide().bfloat16(), device="cuda", resident=resident)
        x = torch.ones(4, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            engine.model(x).square().mean().backward()
        engine.synchronize()
        return torch.cat([p.grad.host().reshape(-1) for p in engine.model.parameters()])

    for _ in range(5):
        assert torch.equal(grads(("*",)), grads(()))
