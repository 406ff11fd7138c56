"""Coverage after: how many elements each layer of a worker's model got, against what a whole checkpoint gives it.

vLLM's layer-wise reload counts elements per layer but does not insist: a layer that got nothing gets its old tensors
back, one that got a part is processed, and both are only logged (model_executor/model_loader/reload/layerwise.py,
0.27.1). The size of a layer is no measure either: padding is never loaded, buffers are not, and a tied head gets
nothing.

So the right counts are measured: before the engine serves, the model's own `load_weights` runs once over tensors that
have the names, dtypes and shapes of model.path but no content, into tensors on the meta device. The same loaders that
will take the update say what they would copy, and no weight changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import get_numel_loaded, to_meta_tensor
from vllm.model_executor.model_loader.reload.utils import get_layer_size, get_layer_tensors

NAMED_AT_MOST = 5  # layers named in one message
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class LayerCount:
    """Elements of one layer."""

    loaded: int  # that a whole checkpoint loads
    size: int  # of all its tensors, padding and buffers included


def measure_layers(
    model: torch.nn.Module, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> Mapping[str, LayerCount]:
    """Elements that each layer of `model` gets from a checkpoint with these dtypes and shapes. Changes no weight."""
    loaded: dict[str, int] = {}
    initialize_layerwise_reload(model)
    try:
        for name, layer in model.named_modules():
            for tensor_name, tensor in get_layer_tensors(layer).items():
                tensor.weight_loader = _counting_loader(loaded, name, tensor, tensor_name)
        sizes = {name: get_layer_size(layer) for name, layer in model.named_modules()}
        model.load_weights(_hollow(tensors))
    finally:
        abandon(model)
    if not any(loaded.values()):
        raise RuntimeError("no loader of the model takes any tensor of its own checkpoint")
    return {name: LayerCount(loaded.get(name, 0), size) for name, size in sizes.items()}


def _counting_loader(
    loaded: dict[str, int], layer_name: str, tensor: torch.Tensor, tensor_name: str
) -> Callable[..., Any]:
    """Stands in for a tensor's loader and runs it on a copy without content: some tensors stay live in a reload."""
    original = _get_original_loader(tensor)
    signature = inspect.signature(original)

    def online_process_loader(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if "param" not in bound.arguments:
            raise RuntimeError(
                f"the loader of {layer_name}.{tensor_name} takes no `param`; its elements cannot be counted"
            )
        bound.arguments["param"] = to_meta_tensor(bound.arguments["param"])
        count, answer = get_numel_loaded(original, bound)
        if count > bound.arguments["param"].numel():
            raise RuntimeError(
                f"this vLLM counts {layer_name}.{tensor_name} more than once: it would process the layer too early"
            )
        loaded[layer_name] = loaded.get(layer_name, 0) + count
        return answer

    # vLLM takes wrappers off by this name (here through `abandon`).
    online_process_loader.__wrapped__ = original  # type: ignore[attr-defined]
    return online_process_loader


def _hollow(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (dtype, shape) in tensors.items():
        yield name, torch.zeros((), dtype=TORCH_DTYPES[dtype]).expand(shape)  # one element, repeated by strides of 0


def abandon(model: torch.nn.Module) -> None:
    """End a reload without finishing it: layers that were not processed get their old tensors back.

    Without this the next reload would go on with the counts and buffered tensors of this one.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        # Before the tensors on the meta device are put away: vLLM keeps them, and their loaders, for the next reload.
        for tensor in get_layer_tensors(layer).values():
            if hasattr(tensor, "weight_loader"):
                tensor.weight_loader = _get_original_loader(tensor)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload  # vLLM's own mark, set by initialize


def compare_layers(model: torch.nn.Module, expected: Mapping[str, LayerCount]) -> list[str]:
    """What is wrong with the layers of a reload before it is finished; empty if every layer got all its elements."""
    problems = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        count = expected[name]
        # A processed layer was reset: it had reached its size.
        loaded = info.load_numel if info.can_load() else max(count.size, count.loaded)
        if loaded != count.loaded:
            problems.append(f"layer {name or '(root)'} ({type(layer).__name__}): {loaded} of {count.loaded} elements")
    return problems


def keep_unloadable(model: torch.nn.Module) -> None:
    """Give layers that no checkpoint loads anything into their own tensors back, before vLLM processes the others.

    0.23.0 leaves those without buffers that are views of parameters; later releases do this themselves.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and not info.load_numel_total and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)


def loaded_layers(expected: Mapping[str, LayerCount]) -> int:
    """Layers that a checkpoint loads anything into."""
    return sum(count.loaded > 0 for count in expected.values())


def summarise(problems: list[str]) -> str:
    """One message of many."""
    more = len(problems) - NAMED_AT_MOST
    return "; ".join(problems[:NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else "")


def process_tied(model: torch.nn.Module) -> None:
    """Let vLLM process layers anew that share their weight with another one.

    On CPUs it keeps a packed copy of a weight beside it (model_executor/layers/utils.py, the function
    dispatch_cpu_unquantized_gemm). Nobody loads a tied head, so nobody packs it again: in 0.32.0, which packs small
    ones, it answered by the weights before.
    """
    sharing: dict[int, list[torch.nn.Module]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and weight.numel() and not weight.is_meta:
            sharing.setdefault(weight.data_ptr(), []).append(layer)
    for layers in sharing.values():
        for layer in layers if len(layers) > 1 else ():
            if (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)
