"""Faster matrix products for CPU: weights prepacked for oneDNN, and linears that read the same input run as one.

Modules and parameters keep their places and names, so state_dict and weight updates are untouched; only `forward` of
each nn.Linear is replaced. The packed copy doubles the memory of the linears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Siblings that models call one after the other on the same input. If one does not, it is computed on its own.
_SHARE_INPUT = (("q_proj", "k_proj", "v_proj"),)
_DTYPES = (torch.bfloat16, torch.float32)


class PackedLinears:
    """All plain CPU linears of a model, packed. `refresh` after every change of weights, `free` to drop the copies."""

    def __init__(self, model: nn.Module) -> None:
        self._groups = [_Group(linears) for linears in _groups(model)] if torch.backends.mkldnn.is_available() else []
        self._group_of = {linears: group for group in self._groups for linears in group.linears}
        self.refresh()

    def product(
        self,
        linear: nn.Linear,
        x: torch.Tensor,
        other: torch.Tensor | None = None,
        combine: str = "add",
        *,
        activation: str = "none",
    ) -> torch.Tensor:
        """activation(linear(x)), or linear(x) combined with `other` by `add` or `mul`, in one product.

        For the first of several linears that share their input, the outputs of all, side by side in the last dim.
        """
        group = self._group_of[linear]
        if other is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, other, group.packed, group.bias, combine)
        return torch.ops.mkldnn._linear_pointwise(x, group.packed, group.bias, activation, [], "")

    def __contains__(self, linear: object) -> bool:
        return linear in self._group_of

    @torch.no_grad()
    def refresh(self) -> None:
        """Pack the current weights."""
        for group in self._groups:
            group.pack()

    def free(self) -> None:
        """Drop the packed copies; the linears compute on nothing until `refresh`."""
        for group in self._groups:
            group.packed = group.bias = None


class _Group:
    """Linears computed in one product when the first is called; the others hand out their share of it."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = linears
        self._sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._shares: tuple[torch.Tensor, ...] = ()
        self.packed: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        first: Any = linears[0]  # Any here and below: mypy takes no replacement for a method
        first.forward = self._compute if len(linears) > 1 else self._product
        for i, linear in enumerate(linears[1:], start=1):
            sibling: Any = linear
            sibling.forward = self._share(i, linear)

    def pack(self) -> None:
        weights = [linear.weight for linear in self.linears]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights) if len(weights) > 1 else weights[0])
        if any(linear.bias is not None for linear in self.linears):
            biases: list[torch.Tensor] = [
                w.new_zeros(len(w)) if m.bias is None else m.bias for w, m in zip(weights, self.linears, strict=True)
            ]
            self.bias = torch.cat(biases)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        self._input = x
        self._shares = self._product(x).split(self._sizes, dim=-1)
        return self._shares[0]

    def _share(self, index: int, linear: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        last = index == len(self.linears) - 1

        def forward(x: torch.Tensor) -> torch.Tensor:
            if x is not self._input:
                return F.linear(x, linear.weight, linear.bias)
            share = self._shares[index]
            if last:
                self._input, self._shares = None, ()
            return share

        return forward


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Groups of one or more linears; subclasses of nn.Linear are left alone, they may do something else."""
    for module in model.modules():
        plain = {
            name: child
            for name, child in module.named_children()
            if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype in _DTYPES
        }
        for names in _SHARE_INPUT:
            if all(name in plain for name in names):
                yield [plain.pop(name) for name in names]
        for child in plain.values():
            yield [child]
