"""A transformers model run one decoder layer at a time: memory is one layer, the embeddings and the hidden
states.

The whole model is built without weights. Its layers are replaced by slots that hand the hidden state through
and note the other arguments of the call (masks, RoPE tables), so any decoder can be streamed without knowing
its forward().
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import progress
from ..errors import ConvertError, need
from ..ir import ModelSpec
from ..source.checkpoint import Checkpoint


class Slot(nn.Module):
    """Stands where a decoder layer stood."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.held = [layer]  # in a list: not a submodule, so its weightless parameters are not the model's
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.inputs: Tensor | None = None
        self.output: Tensor | None = None
        self.as_tuple = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.held[0], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.inputs, self.args, self.kwargs = hidden, args, kwargs
        result = hidden if self.output is None else self.output
        return (result,) if self.as_tuple else result


class LayerStream:
    """Runs `tokens` [windows, window] through the model of a checkpoint, layer by layer, in float32."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, tokens: NDArray[np.int64], device: str, label: str
    ) -> None:
        self.checkpoint, self.spec, self.label = checkpoint, spec, label
        self.device = _device(device)
        self.tokens = torch.from_numpy(tokens)
        self.model = _without_weights(checkpoint).eval()
        layers = self.model.get_submodule(spec.layers)
        assert isinstance(layers, nn.ModuleList)
        self.slots = [Slot(layer) for layer in layers]
        for index, slot in enumerate(self.slots):
            layers[index] = slot
        self._load(self.model, "")
        self.model.tie_weights()
        self.model.to(self.device)

    @property
    def n_windows(self) -> int:
        return int(self.tokens.shape[0])

    def embed(self) -> Tensor:
        """Input of the first layer, [windows, window, d] on the CPU. Also fills every slot's call
        arguments."""
        with torch.no_grad():
            self._probe()
            parts = []
            for window in self.tokens:
                self.model.base_model(input_ids=window[None].to(self.device), use_cache=False)
                assert self.slots[0].inputs is not None
                parts.append(self.slots[0].inputs.cpu())
        return torch.cat(parts)

    def _probe(self) -> None:
        """Finds out whether layers return a tensor or a tuple, which differs between models and versions."""
        with contextlib.suppress(Exception):  # the model may choke on the wrong kind after the first slot
            self.model.base_model(input_ids=self.tokens[:1, :8].to(self.device), use_cache=False)
        slot = self.slots[0]
        assert slot.inputs is not None
        with self.layer(0) as live:
            result = live(slot.inputs, *slot.args, **slot.kwargs)
        for each in self.slots:
            each.as_tuple = isinstance(result, tuple)

    @contextlib.contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """A decoder layer with its weights, without gradients, on the device; dropped on exit."""
        live = copy.deepcopy(self.slots[index].held[0])
        self._load(live, f"{self.spec.layers}.{index}.")
        live.to(self.device).requires_grad_(False)
        yield live
        del live

    def run(self, live: nn.Module, index: int, hidden: Tensor) -> Tensor:
        """Output [1, window, d] of layer `index` for one window's input, on the device.

        Raises:
            ConvertError: the output is not finite.
        """
        slot = self.slots[index]
        result = live(hidden.to(self.device), *slot.args, **slot.kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        if not torch.isfinite(output).all():
            raise ConvertError(
                f"layer {index}", "finite activations on the calibration text", "NaN or infinity"
            )
        return output

    def loss(self, window: int, hidden: Tensor) -> Tensor:
        """Mean next-token negative log-likelihood of a window in nats, from the last layer's output [1,
        window, d]."""
        tokens = self.tokens[window][None].to(self.device)
        self.slots[-1].output = hidden
        try:
            logits = self.model(input_ids=tokens, use_cache=False).logits
        finally:
            self.slots[-1].output = None
        return torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:])

    def bar(self, passes: int = 1) -> Any:
        total = passes * self.spec.n_layer * self.n_windows
        return progress.bar(total, f"calibrate {self.label}", "window")

    def _load(self, module: nn.Module, prefix: str) -> None:
        """Fills the weightless parameters of a module from the checkpoint; tied ones come from their twin."""
        tied = set(getattr(module, "_tied_weights_keys", None) or ())
        for name, parameter in list(module.named_parameters()):
            if parameter.device.type != "meta":
                continue
            if name in tied and prefix + name not in self.checkpoint:
                continue
            array = self.checkpoint.read(prefix + name)
            if array.shape != tuple(parameter.shape):
                raise ConvertError(prefix + name, f"shape {list(parameter.shape)}", f"{list(array.shape)}")
            owner, _, leaf = name.rpartition(".")
            weight = nn.Parameter(torch.from_numpy(array), requires_grad=False)
            setattr(module.get_submodule(owner), leaf, weight)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConvertError(
            "--device", "a device that torch can use", f"{name} ({str(error).splitlines()[0]})"
        ) from None
    return device


def _without_weights(checkpoint: Checkpoint) -> Any:
    """The transformers model with every parameter on the meta device and every buffer real."""
    transformers = need("transformers")
    try:
        config = transformers.AutoConfig.for_model(**checkpoint.config)
    except Exception as error:  # the classes that validate a config differ between versions of transformers
        raise ConvertError("config.json", "a config that transformers accepts", str(error)) from None
    name, register = "register_parameter", nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    setattr(nn.Module, name, on_meta)
    try:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    finally:
        setattr(nn.Module, name, register)
