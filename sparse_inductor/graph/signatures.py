"""The parameters of every known function, by its canonical name."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

import torch
from torch import fx

from ..epilogue.functions import FUNCTIONS

# name: parameters in positional order. "*x" takes the remaining positional arguments as one tuple.
_UNARY = (
    "abs sin cos sign invert logical_not contiguous clone detach alias tanhshrink "
    "isnan T t mT H mH conj view_as_real sinh cosh tan positive hardswish silu mish erfc "
    "floor ceil round trunc zero isinf isfinite lift_fresh max_all min_all zeros_like ones_like"
).split()
_BINARY = (
    "mul div pow maximum minimum logaddexp fmax fmin gt ge lt le eq ne and_ or_ xor matmul mm bmm inner fmod remainder "
    "dot copy view_as expand_as div_floor div_trunc"
).split()
_TEXTS: dict[str, str] = {
    **dict.fromkeys(_UNARY, "input"),
    **{name: f"input {function.parameters}" for name, function in FUNCTIONS.items()},
    **dict.fromkeys(_BINARY, "input other"),
    **dict.fromkeys("add sub rsub".split(), "input other alpha=1"),
    "gelu": "input approximate='none'",
    **dict.fromkeys("softmax log_softmax count_nonzero squeeze".split(), "input dim=None"),
    "clamp": "input min=None max=None",
    "clamp_min": "input min",
    "clamp_max": "input max",
    "nan_to_num": "input nan=None posinf=None neginf=None",
    "addcmul": "input tensor1 tensor2 value=1",
    "lerp": "input end weight",
    "dropout": "input p=0.5 training=True",
    "where": "condition input other",
    "masked_fill": "input mask value",
    "index_fill": "input dim index value",
    "setitem": "input index value",
    "getitem": "input index",
    "index_put": "input indices values accumulate=False",
    "getattr": "input name default=None",
    "metadata": "input name",  # x.shape, x.dim() and the like
    "fill": "input value",
    "prelu": "input weight",
    "linear": "input weight bias=None",
    **dict.fromkeys(("addmm", "baddbmm"), "bias input weight beta=1 alpha=1"),
    "einsum": "equation *operands",
    "tensordot": "input other dims=2",
    **dict.fromkeys(
        "conv1d conv2d conv3d".split(),
        "input weight bias=None stride=1 padding=0 dilation=1 groups=1",
    ),
    "permute": "input *dims",
    "transpose": "input dim0 dim1",
    "movedim": "input source destination",
    "view": "input *shape",
    "flatten": "input start_dim=0 end_dim=-1",
    "unflatten": "input dim sizes",
    **dict.fromkeys("expand repeat tile".split(), "input *sizes"),
    "repeat_interleave": "input repeats dim=None",
    "narrow": "input dim start length",
    "slice": "input dim=0 start=None end=None step=1",
    "index": "input indices",
    **dict.fromkeys("select index_select gather".split(), "input dim index"),
    "take": "input index",
    "take_along_dim": "input index dim=None",
    "embedding": "input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False sparse=False",
    "embedding_bag": "input weight offsets=None max_norm=None norm_type=2.0 scale_grad_by_freq=False mode='mean' "
    "sparse=False per_sample_weights=None include_last_offset=False padding_idx=None",
    "index_add": "input dim index source alpha=1",
    "scatter": "input dim index src reduce=None",
    "scatter_add": "input dim index src",
    "put": "input index source accumulate=False",
    **dict.fromkeys(
        ("scatter_reduce", "index_reduce"), "input dim index src reduce include_self=True"
    ),
    "bincount": "input weights=None minlength=0",
    "segment_reduce": "data reduce lengths=None indices=None offsets=None axis=0 unsafe=False initial=None",
    "vecdot": "input other dim=-1",
    "multi_dot": "tensors",
    "pad": "input pad mode='constant' value=None",
    "split": "input split_size dim=0",
    "chunk": "input chunks dim=0",
    "tensor_split": "input indices_or_sections dim=0",
    "unbind": "input dim=0",
    **dict.fromkeys(("cat", "stack"), "tensors dim=0"),
    **dict.fromkeys(("cast", "layer_norm"), "input *rest"),
    **dict.fromkeys("sum mean aminmax argmax any all".split(), "input dim=None keepdim=False"),
    **dict.fromkeys(("amax", "amin"), "input dim=() keepdim=False"),
    **dict.fromkeys("max_dim min_dim logsumexp".split(), "input dim keepdim=False"),
    "median": "input dim=None keepdim=False",
    "l1_loss": "input target size_average=None reduce=None reduction='mean' weight=None",
    **dict.fromkeys(("norm", "vector_norm", "linalg_norm"), "input p=2 dim=None keepdim=False"),
    "topk": "input k dim=-1 largest=True sorted=True",
    **dict.fromkeys(("sort", "argsort"), "input dim=-1 descending=False stable=False"),
    "kthvalue": "input k dim=-1 keepdim=False",
    **dict.fromkeys(("unsqueeze", "cummax"), "input dim"),
    "full": "size fill_value",
    "full_like": "input fill_value",
    **dict.fromkeys(("zeros", "ones"), "*size"),
    "new_full": "input size fill_value",
    **dict.fromkeys(("new_zeros", "new_ones"), "input *size"),
    "new_tensor": "input data",
    **dict.fromkeys(("tensor", "scalar_tensor"), "data"),
    **dict.fromkeys(
        (f"max_pool{n}d" for n in (1, 2, 3)),
        "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False",
    ),
    **{f"adaptive_max_pool{n}d": "input output_size return_indices=False" for n in (1, 2, 3)},
    "batch_norm": "input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-05",
    "normalize": "input p=2.0 dim=1",
    "cumsum": "input dim dtype=None",
    "diff": "input n=1 dim=-1 prepend=None append=None",
    "arange": "start end=None step=1",
    **dict.fromkeys(("tril", "triu"), "input diagonal=0"),
    "eye": "n m=None",
    "autograd_function_apply": "forward backward *operands",
    "to_local": "input grad_placements=None",
    "redistribute": "input device_mesh=None placements=None",
    "from_local": "input device_mesh=None placements=None run_check=False shape=None stride=None",
    "_transformer_encoder_layer_fwd": (
        "src embed_dim num_heads qkv_weight qkv_bias proj_weight proj_bias use_gelu norm_first eps norm_weight_1 "
        "norm_bias_1 norm_weight_2 norm_bias_2 ffn_weight_1 ffn_bias_1 ffn_weight_2 ffn_bias_2 mask=None mask_type=None"
    ),
    "entmax_op": "input alpha alpha_value dim undefined=''",
    # the entmax package
    **dict.fromkeys(("entmax15", "sparsemax"), "input dim=-1 k=None"),
    "entmax_bisect": "input alpha=1.5 dim=-1 n_iter=50 ensure_sum_one=True",
    "sparsemax_bisect": "input dim=-1 n_iter=50 ensure_sum_one=True",
    "normmax_bisect": "input alpha=2 dim=-1 n_iter=50",
    "budget_bisect": "input budget=2 dim=-1 n_iter=50",
    **dict.fromkeys(("sparsemax_loss", "entmax15_loss"), "input target"),
    "sparsemax_bisect_loss": "input target n_iter=50",
    "entmax_bisect_loss": "input target alpha=1.5 n_iter=50",
}


class _Signature(NamedTuple):
    """The names of the parameters, the name of a variadic last one or "", the required names, and the defaults."""

    names: tuple[str, ...]
    several: str
    required: frozenset[str]
    defaults: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> _Signature:
        params = text.split()
        several = params.pop()[1:] if params and params[-1].startswith("*") else ""
        names = tuple(p.partition("=")[0] for p in params)
        optional = (p.split("=") for p in params if "=" in p)
        defaults = {name: ast.literal_eval(value) for name, value in optional}
        return cls(names, several, frozenset({*names} - {*defaults}), defaults)


SIGNATURES = {name: _Signature.parse(text) for name, text in _TEXTS.items()}
_KEYWORDS = {
    "self": "input", "x": "input", "X": "input", "a": "input", "mat2": "other", "axis": "dim", "keepdims": "keepdim",
    "indices": "index", "mat1": "input", "batch1": "input", "batch2": "weight", "tensor": "input", "vec2": "other",
    "vec": "other", "inp": "input", "exponent": "other", "split_size_or_sections": "split_size",
}  # fmt: skip
_KEYWORDS_OF = {
    "addmm": {"input": "bias", "mat1": "input", "mat2": "weight", "self": "bias"},
    "baddbmm": {"input": "bias", "batch1": "input", "batch2": "weight", "self": "bias"},
    "view": {"size": "shape"},
    "expand": {"size": "sizes"},
    "repeat": {"repeats": "sizes"},
    "tile": {"dims": "sizes"},
    "tensordot": {"a": "input", "b": "other"},
    **{name: {"ord": "p"} for name in ("vector_norm", "linalg_norm")},
}


def bind(name: str, args: tuple, kwargs: dict) -> dict[str, Any] | None:
    """Return the arguments of a call by parameter name; None where one is missing, or for an unknown function."""
    if name not in SIGNATURES:
        return None
    names, several, required, _ = SIGNATURES[name]
    bound: dict[str, Any] = dict(zip(names, args))
    rest = args[len(names) :] if several else ()
    if rest:
        bound[several] = _one_by_one(rest)
    renames = _KEYWORDS_OF.get(name, {})
    for key, value in kwargs.items():
        known = key in names or key == several
        key = renames.get(key) or (key if known else _KEYWORDS.get(key, key))
        bound[key] = _one_by_one((value,)) if key == several else value
    return bound if required <= bound.keys() else None


def _one_by_one(given: tuple) -> tuple:
    """Return the arguments of a variadic parameter as a tuple. They are given one by one, as a sequence, or as a node
    that creates a torch.Size."""
    one = given[0] if len(given) == 1 else given
    if isinstance(one, fx.Node) and one.target is torch.Size:
        one = one.args[0]
    return tuple(one) if isinstance(one, (tuple, list)) else given
