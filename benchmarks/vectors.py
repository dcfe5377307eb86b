"""The vectors that the codec benchmark compresses, on the 62 layers of a ResNet-18 (11.17 M float32).

- t3: Student t with 3 degrees of freedom, a log-normal scale a layer.
- gradient: of a mini-batch after a short training run, scikit-learn's digits scaled up to 32 x 32.
- feedback: what a client under error feedback really compresses, memory and gradient together:
  e + g after so many rounds in which the 1 % largest of every layer went out and the rest stayed in e.

The last two are trained here, with an explicit seed; no data is needed beyond scikit-learn's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression import UP, Header, Layout, Slot, tag4, topk_indices

WARM_STEPS, FEEDBACK_ROUNDS, BATCH = 20, 30, 32
LEARNING_RATE, SENT = 0.02, 0.01
Arrays = dict[str, NDArray[Any]]


def resnet18() -> dict[str, tuple[int, ...]]:
    """Shapes of the 62 trainable layers of a ResNet-18 for 10 classes."""
    shapes: dict[str, tuple[int, ...]] = {"conv1": (64, 3, 7, 7), "bn1.weight": (64,), "bn1.bias": (64,)}
    before = 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            name = f"layer{stage}.{block}"
            for at, inputs in ((1, before), (2, width)):
                shapes[f"{name}.conv{at}"] = (width, inputs, 3, 3)
                shapes[f"{name}.bn{at}.weight"] = shapes[f"{name}.bn{at}.bias"] = (width,)
            if block == 0 and stage > 1:
                shapes[f"{name}.downsample.0"] = (width, before, 1, 1)
                shapes[f"{name}.downsample.1.weight"] = shapes[f"{name}.downsample.1.bias"] = (width,)
            before = width
    return shapes | {"fc.weight": (10, 512), "fc.bias": (10,)}


def t3() -> Arrays:
    """Heavy-tailed noise."""
    rng = np.random.default_rng(2026)
    return {
        name: (rng.standard_t(3, shape) * np.exp(rng.standard_normal())).astype(np.float32)
        for name, shape in resnet18().items()
    }


def trained() -> tuple[Arrays, Arrays]:
    """(gradient, feedback) of a short training run."""
    import torch
    from sklearn.datasets import load_digits
    from torchvision.models import resnet18 as model_of

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(2026)
        model = model_of(num_classes=10)
    bunch = load_digits()
    images = torch.from_numpy(bunch.images.astype(np.float32) / 16.0)[:, None]
    images = torch.nn.functional.interpolate(images, size=(32, 32), mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    rng = np.random.default_rng(2026)

    def gradient() -> Arrays:
        batch = torch.from_numpy(rng.choice(len(labels), BATCH, replace=False))
        model.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        return {n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None}

    def step(direction: Arrays) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= LEARNING_RATE * torch.from_numpy(direction[name])

    for _ in range(WARM_STEPS):
        step(gradient())
    plain = gradient()
    memory = {name: np.zeros_like(g) for name, g in plain.items()}
    for _ in range(FEEDBACK_ROUNDS):
        sent: Arrays = {}
        for name, g in gradient().items():
            memory[name] += g
            flat = memory[name].reshape(-1)
            at = topk_indices(flat, max(1, int(SENT * flat.size)))
            out = np.zeros_like(flat)
            out[at] = flat[at]
            flat[at] = 0.0
            sent[name] = out.reshape(g.shape)
        step(sent)
    last = gradient()
    return plain, {name: memory[name] + g for name, g in last.items()}


def prepared(arrays: Arrays) -> tuple[Layout, Header, list[NDArray[Any]]]:
    """The layout, a header, and the flat layers."""
    layout = Layout.of(arrays)
    flat, _ = layout.split(arrays)
    header = Header(UP, layout.digest, tag4("benchmark"), tag4("client"), 1, 1, slots=((int(Slot.H), bytes(8)),))
    return layout, header, flat
