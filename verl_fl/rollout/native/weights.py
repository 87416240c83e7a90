"""Weight and LoRA updates of a served model, checked against its state_dict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_SHOWN = 10


class ServedWeights:
    """Loads checked updates into a model in place; knows whether the weights are whole.

    A failed full update leaves a mixture of old and new: `incomplete` then says why, until a full update succeeds.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # keep_vars: aliases (tied weights) are the same object here.
        self._tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._shapes = {name: t.shape for name, t in self._tensors.items()}
        self._dtypes = {name: t.dtype for name, t in self._tensors.items()}
        self._aliases: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            self._aliases.setdefault(id(tensor), []).append(name)
        self._lora_bases: dict[str, torch.Tensor] = {}
        self.incomplete: str | None = None

    @torch.no_grad()
    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights; any dtype, cast to the served one. Of tied aliases at least one must be given.

        Raises ValueError naming up to 10 unknown, missing, duplicate or wrongly shaped names; whatever the iterable
        raises passes through. After an error the weights are incomplete.
        """
        self.incomplete = "a full update did not finish"
        problems: dict[str, list[str]] = {"unknown": [], "wrong shape": [], "duplicate": [], "missing": []}
        seen: set[str] = set()
        self._lora_bases.clear()
        try:
            for name, tensor in named_tensors:
                if name not in self._tensors:
                    problems["unknown"].append(name)
                elif name in seen:
                    problems["duplicate"].append(name)
                elif tensor.shape != self._shapes[name]:
                    found = f"{name} {list(tensor.shape)} (served: {list(self._shapes[name])})"
                    problems["wrong shape"].append(found)
                else:
                    self._write(name, tensor)
                seen.add(name)
            for names in self._aliases.values():
                if seen.isdisjoint(names):
                    problems["missing"].append(names[0])
            if any(problems.values()):
                raise ValueError(_describe(problems, self._tensors))
        except BaseException as error:
            self.incomplete = f"a full update failed: {error}"
            raise
        self.incomplete = None

    @torch.no_grad()
    def load_lora(self, named_tensors: Iterable[tuple[str, torch.Tensor]], peft_config: Mapping[str, Any]) -> None:
        """Serve base weights + scale * B @ A for the given adapter; replaces an adapter loaded before.

        Names and config are PEFT's (`get_peft_model_state_dict`, `LoraConfig.to_dict`). Raises ValueError, with the
        weights untouched, for kinds of adapters that cannot be merged and for names or shapes that do not match.
        """
        pairs = self._lora_pairs(dict(named_tensors), peft_config)
        for name, base in self._lora_bases.items():
            self._tensors[name].copy_(base)
        self._lora_bases = {name: self._tensors[name].detach().clone() for name in pairs}
        for name, (a, b, scale) in pairs.items():
            delta = (b @ a) * scale
            delta = delta.T if peft_config.get("fan_in_fan_out") else delta
            self._tensors[name].copy_(self._lora_bases[name].float() + delta)

    def free(self) -> None:
        """Release the memory of all weights; incomplete until the next full update."""
        self.incomplete = "they were released by sleep(level=2)"
        self._lora_bases.clear()
        for tensor in self._tensors.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        served = self._tensors[name]
        if served.shape != self._shapes[name]:
            served.data = torch.empty(self._shapes[name], dtype=served.dtype, device=served.device)
        served.copy_(tensor)

    def _lora_pairs(
        self, tensors: dict[str, torch.Tensor], config: Mapping[str, Any]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
        """A [rank, in] and B [out, rank] in fp32, and the scale, of each adapted weight by HF name."""
        _check_lora_config(config)
        halves: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight", name)
            if match is None:
                raise ValueError(_lora_error(f"the tensor {name!r}", "names ending in lora_A.weight or lora_B.weight"))
            halves.setdefault(match[1], {})[match[2]] = tensor
        pairs = {}
        for module, pair in halves.items():
            name = f"{module}.weight"
            if name not in self._tensors or len(self._aliases[id(self._tensors[name])]) > 1:
                raise ValueError(_lora_error(f"the adapted module {module!r}", "untied linear layers of this model"))
            if pair.keys() != {"A", "B"}:
                raise ValueError(_lora_error(f"only lora_{''.join(pair)} of {module!r}", "both lora_A and lora_B"))
            a, b = (pair[k].to(self._tensors[name].device, torch.float32) for k in "AB")
            shape = [b.shape[0], a.shape[-1]]
            if config.get("fan_in_fan_out"):
                shape.reverse()
            if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or shape != list(self._shapes[name]):
                found = f"{module!r} with A {list(a.shape)} and B {list(b.shape)}"
                raise ValueError(_lora_error(found, f"a product of shape {list(self._shapes[name])}"))
            pairs[name] = a, b, _lora_scale(module, a.shape[0], config)
        return pairs


def _lora_scale(module: str, rank: int, config: Mapping[str, Any]) -> float:
    alpha = config.get("lora_alpha", rank)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def _check_lora_config(config: Mapping[str, Any]) -> None:
    unmergeable = {
        "use_dora": bool(config.get("use_dora")),
        "lora_bias": bool(config.get("lora_bias")),
        "bias": config.get("bias", "none") != "none",
        "modules_to_save": bool(config.get("modules_to_save")),
    }
    for key, asked in unmergeable.items():
        if asked:
            raise ValueError(_lora_error(f"{key}={config[key]!r}", "plain LoRA on linear layers"))


def _lora_error(found: str, legal: str) -> str:
    return f"LoRA update of the native engine: found {found}; legal are {legal}. Change the adapter's config."


def _describe(problems: dict[str, list[str]], served: Mapping[str, Any]) -> str:
    parts = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            parts.append(f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{more}")
    return (
        f"weight update of the native engine: {'; '.join(parts)}. Legal are the {len(served)} names of the served "
        f"model's state_dict, each once (such as {next(iter(served))!r}). Send the full state_dict of the same model."
    )
