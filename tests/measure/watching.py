"""A small training loop, watched, for the tests of `flatout.watch`."""

import torch

WIDTH = 16


def batches(number: int):
    """Yield random batches."""
    for _ in range(number):
        yield torch.randn(4, WIDTH)


def train(watch, steps: int = 60, *, source=None, before=None, after=None) -> torch.nn.Module:
    """Train for some steps; `before` runs in each step, and `after` after it, with its number."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number, batch in enumerate(watch(batches(steps) if source is None else source)):
        with watch.step():
            if before is not None:
                before(number)
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.log(loss=loss)
        if after is not None:
            after(number, model)
    return model
