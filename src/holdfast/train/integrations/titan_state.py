"""TorchTitan's model as a plain tree of its parameters, whose state dict has one entry for each.

The state dict of TorchTitan's models is for exchange: fused projections appear in it as the three that they consist of,
which torch's functions for sharded state cannot map to parameters.
"""

from __future__ import annotations

from torch import nn

from holdfast.train.integrations.titan_private import plain_name


def parameter_tree(model: nn.Module) -> nn.Module:
    """Modules without code that hold the same parameters and persistent buffers, under the same names.

    Names leave out wrappers, as of activation checkpoints: turning these on does not change a checkpoint.
    """
    root = nn.Module()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, leaf = plain_name(name).rpartition(".")
        _place(root, path).register_parameter(leaf, parameter)
    saved = {plain_name(name) for name in model.state_dict()}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if (plain := plain_name(name)) in saved:
            path, _, leaf = plain.rpartition(".")
            _place(root, path).register_buffer(leaf, buffer)
    return root


def _place(root: nn.Module, path: str) -> nn.Module:
    place = root
    for name in filter(None, path.split(".")):
        if name not in place._modules:
            place.add_module(name, nn.Module())
        place = place.get_submodule(name)
    return place
