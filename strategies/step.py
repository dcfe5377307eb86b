"""Step 5 of a round, second half: the model moves along the estimate, and a proximal step follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strategies.prox import Prox

FloatArray = NDArray[np.float32] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Proximal:
    """The step after the optimiser's.

    Args:
        step: (x, gamma) -> x, of a flat float64 array.
        scale: gamma is this many times the learning rate.
    """

    step: Prox
    scale: float


class ServerOptimizer:
    """Model parameters on the server and the optimiser that moves them.

    The mean update g = mean of (received - trained) stands where a gradient would, so SGD
    with learning rate 1 gives x - g: FedAvg's step. SGD's momentum is the heavy ball of DIANA's
    Algorithm 1: v = beta v + g, not normalised.

    Args:
        name: class of torch.optim.
        lr: learning rate.
        parameters: flat arrays, one a compressed layer; copied.
        args: further arguments of the class.
        proximal: what follows each step; None: nothing.
    """

    def __init__(
        self,
        name: str,
        lr: float,
        parameters: Sequence[FloatArray],
        args: Mapping[str, Any] | None = None,
        proximal: Proximal | None = None,
    ) -> None:
        self._parameters = [torch.nn.Parameter(torch.tensor(p)) for p in parameters]
        self._proximal = proximal
        self.lr = lr
        args = dict(args or {})
        # Plain SGD is written out: torch.optim's first step imports torch's compiler, 3 s and 150 MB.
        written_out = name == "SGD" and not args.keys() - {"momentum"}
        self._beta: float = args.get("momentum", 0.0) if written_out else 0.0
        self._v: list[torch.Tensor] | None = None
        self._optimizer: torch.optim.Optimizer | None = (
            None if written_out else getattr(torch.optim, name)(self._parameters, lr=lr, **args)
        )

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[np.generic]]]:
        """What the optimiser remembers: plain values, and arrays by "parameter/name"."""
        if self._optimizer is None:
            return {}, {f"{at}/v": v.numpy().copy() for at, v in enumerate(self._v or ())}
        saved = self._optimizer.state_dict()
        plain: dict[str, Any] = {"groups": saved["param_groups"], "state": {}}
        arrays: dict[str, NDArray[np.generic]] = {}
        for index, values in saved["state"].items():
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    arrays[f"{index}/{name}"] = value.detach().cpu().numpy().copy()
                else:
                    plain["state"].setdefault(str(index), {})[name] = value
        return plain, arrays

    def restore(self, plain: Mapping[str, Any], arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Go back to what `state` was; the parameters are given when this is made."""
        if self._optimizer is None:
            if arrays:
                self._v = [torch.from_numpy(np.array(arrays[f"{at}/v"])) for at in range(len(self._parameters))]
            return
        state: dict[int, dict[str, Any]] = {int(i): dict(values) for i, values in plain["state"].items()}
        for key, array in arrays.items():
            index, _, name = key.partition("/")
            state.setdefault(int(index), {})[name] = torch.from_numpy(np.array(array))
        self._optimizer.load_state_dict({"state": state, "param_groups": plain["groups"]})

    def step(self, update: Sequence[NDArray[np.float64]]) -> list[FloatArray]:
        """One step along -g, and the proximal one; returns the new parameters, flat, in each layer's dtype."""
        if self._beta and self._v is None:
            self._v = [torch.zeros_like(p.data) for p in self._parameters]
        for at, (parameter, mean) in enumerate(zip(self._parameters, update, strict=True)):
            g = torch.from_numpy(mean).to(parameter.dtype)
            if self._optimizer is not None:
                for group in self._optimizer.param_groups:
                    group["lr"] = self.lr
                parameter.grad = g
                continue
            if self._v is not None:
                g = self._v[at].mul_(self._beta).add_(g)
            parameter.data.sub_(g, alpha=self.lr)
        if self._optimizer is not None:
            self._optimizer.step()
        if self._proximal is not None:
            gamma = self._proximal.scale * self.lr
            for parameter in self._parameters:
                x = np.asarray(self._proximal.step(parameter.detach().numpy().astype(np.float64), gamma))
                parameter.data.copy_(torch.from_numpy(np.array(x)).reshape(parameter.shape))
        return [p.detach().numpy().copy() for p in self._parameters]


def combine_whole(parts: Sequence[tuple[float, NDArray[np.generic]]]) -> NDArray[np.generic]:
    """Arrays that travel whole, as the server combines them.

    Args:
        parts: (weight, array) of each participant, in client order.

    Returns:
        Integers and booleans: the maximum. Floating point: the weighted mean in float64,
        or the plain mean when all weights are zero.
    """
    arrays = [array for _, array in parts]
    first = arrays[0]
    if not np.issubdtype(first.dtype, np.inexact):
        return np.asarray(np.maximum.reduce(arrays))
    weights = [w for w, _ in parts]
    total = sum(weights)
    shares = [w / total for w in weights] if total > 0 else [1.0 / len(parts)] * len(parts)
    wide = np.result_type(first.dtype, np.float64)
    mean = sum(
        (share * array.astype(wide) for share, array in zip(shares, arrays, strict=True)), np.zeros(first.shape, wide)
    )
    return np.asarray(mean.astype(first.dtype))
