"""Work beside other work: launched one by one it is put off, in a recorded step it has a stream of its own."""

from functools import partial

import pytest
import torch

from deepinfer.ops.beside import Lane, beside


def test_without_a_recording_work_waits_for_its_use() -> None:
    done: list[str] = []
    finish = beside(lambda: done.append("beside"), Lane.STREAMS)
    done.append("meanwhile")
    finish()
    assert done == ["meanwhile", "beside"]


@pytest.mark.gpu
def test_a_recorded_step_gives_the_same_each_time() -> None:
    """Chains on both streams reuse each other's freed memory; every replay must give what one stream gives."""
    device = torch.device("cuda")
    x = torch.empty(64, 256, device=device)

    def chain(start: torch.Tensor, add: float) -> torch.Tensor:
        for _ in range(6):
            start = (start * 1.25 + add).sin()
        return start

    def step() -> torch.Tensor:
        y = x
        for turn in range(20):
            sides = [beside(partial(chain, y, lane.value + turn), lane) for lane in (Lane.STREAMS, Lane.QUERIES)]
            y = chain(y, 0.5) + 0.25 * sides[0]()
            y = chain(y, 0.25) - 0.5 * sides[1]()
        return y

    x.normal_()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for seed in range(5):
        x.normal_(generator=torch.Generator(device).manual_seed(seed))
        graph.replay()
        assert torch.equal(made, step())
