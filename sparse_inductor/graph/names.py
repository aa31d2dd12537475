"""One name and bound arguments for every call, however it is spelled.

`torch.relu(x)`, `F.relu(x, True)`, `x.relu_()` and `torch.ops.aten.relu.default(x)` are all
`Call("relu", {"input": x})`; `x.max(1)`, `torch.max(x, dim=1)` are `max_dim`; `x += y` is `add`, in place.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import string
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import compat
from ..epilogue.functions import FUNCTIONS
from ..facts import NAMESPACE
from .fakes import fake
from .signatures import SIGNATURES, bind


@dataclasses.dataclass(frozen=True)
class Call:
    """A canonical call: its `name`, its `args` by parameter name, and whether it writes its first argument."""

    name: str
    args: dict[str, Any]
    inplace: bool = False

    def __bool__(self) -> bool:
        """Whether it is a call of a known function."""
        return bool(self.name)

    def __getitem__(self, key: str) -> Any:
        return self.args[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.args.get(key, default)

    @property
    def both_ways(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Its two operands, in both orders."""
        a, b = self["input"], self["other"]
        return (a, b), (b, a)

    def ordered(self, negate: bool = False) -> tuple[Any, Any, bool]:
        """Return (large, small, ties) of a comparison, or with `negate` of its negation. It holds where large > small,
        and if `ties` also where they are equal."""
        large, small = self["input"], self["other"]
        if (self.name in ("lt", "le")) ^ negate:
            large, small = small, large
        return large, small, (self.name in ("ge", "le")) ^ negate

    @property
    def drops(self) -> bool:
        """Whether it is an active dropout. A dropout is active unless its arguments disable it."""
        p = self.get("p", 0.5)
        if isinstance(fake(p), torch.SymFloat):
            p = fake(p).node.maybe_as_float()  # F.dropout compares p, so a guard fixes it
        return self.name == "dropout" and bool(self.get("training", True) and p != 0)


# The call for an input of the graph, the result of a foreign function, or a number.
NO_CALL = Call("", {})

_ALIASES = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
    "negative": "neg", "bitwise_not": "invert", "bitwise_and": "and_", "bitwise_or": "or_",
    "logical_and": "and_", "logical_or": "or_", "bitwise_xor": "xor", "logical_xor": "xor",
    "__and__": "and_", "__or__": "or_", "__invert__": "invert", "__getitem__": "getitem", "__setitem__": "setitem",
    "__add__": "add", "__radd__": "add", "__mul__": "mul", "__rmul__": "mul", "__sub__": "sub",
    "__rsub__": "rsub", "__truediv__": "div", "__matmul__": "matmul", "__neg__": "neg",
    "__eq__": "eq", "__ne__": "ne", "__gt__": "gt", "__ge__": "ge", "__lt__": "lt", "__le__": "le",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "linalg_vector_norm": "vector_norm", "_get_data_attr": "detach",
    "clip": "clamp", "absolute": "abs", "arctan": "atan", "arcsinh": "asinh", "expit": "sigmoid",
    "special_expit": "sigmoid", "special_log1p": "log1p", "special_expm1": "expm1", "special_erf": "erf",
    "special_exp2": "exp2", "log_sigmoid": "logsigmoid",
    "pos": "positive", "__pos__": "positive", "numpy_T": "T", "matrix_H": "H",  # x.T and x.H since torch 2.14
    "swapaxes": "transpose", "swapdims": "transpose", "adjoint": "mT", "moveaxis": "movedim",
    "reshape": "view", "_unsafe_view": "view", "_reshape_alias": "view", "view_copy": "view", "ravel": "flatten",
    "reshape_as": "view_as", "broadcast_to": "expand", "concat": "cat", "concatenate": "cat",
    "to": "cast", "type": "cast", "type_as": "cast", "float": "cast", "half": "cast", "bfloat16": "cast",
    "double": "cast", "long": "cast", "int": "cast", "bool": "cast", "_to_copy": "cast", "cuda": "cast", "cpu": "cast",
    "convert_element_type": "cast", "_softmax": "softmax", "_log_softmax": "log_softmax",
    "dropout1d": "dropout", "dropout2d": "dropout", "dropout3d": "dropout", "feature_dropout": "dropout",
    "split_with_sizes": "split", "mv": "matmul", "ger": "outer", "nonzero_tuple": "nonzero",
    "prim_to_local": "to_local", "prim_redistribute": "redistribute", "prim from_local": "from_local",  # torch 2.11
    "unsafe_split": "split", "unsafe_chunk": "chunk", "linalg_vecdot": "vecdot", "linalg_matmul": "matmul",
    "linalg_multi_dot": "multi_dot",
}  # fmt: skip
INPLACE_OPERATORS = {
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "ipow": "pow", "iand": "and_", "ior": "or_",
    "imatmul": "matmul", "ifloordiv": "floordiv", "imod": "remainder", "ixor": "xor",
}  # fmt: skip
_MODULES = ("torch", "_operator", "operator", "builtins", "math", "")
# the entmax package, and the functions that replace its own in a graph
_ENTMAX = ("entmax.activations", "entmax.root_finding", "sparse_inductor.match.entmax.leaves")
# functions whose last positional parameter is `inplace`, with the minimum number of arguments before it
TRAILING_INPLACE = {
    **dict.fromkeys((*FUNCTIONS, "silu", "mish", "hardswish"), 1),
    **dict.fromkeys(
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split(), 3
    ),
    "rrelu": 4,
}
_METADATA_CALLS = frozenset(
    "size dim numel sym_size stride is_floating_point ndimension get_device".split()
)
_SPLITS = {"hsplit": 1, "vsplit": 0, "dsplit": 2}  # the axis, if the tensor has it
_CATS = {"hstack": 1, "column_stack": 1, "vstack": 0, "row_stack": 0, "dstack": 2}
# functions whose canonical name depends on the arguments
_BY_ARGUMENT = frozenset({"max", "min", "getattr", "einsum", *_SPLITS, *_CATS}) | _METADATA_CALLS
_DIMS = frozenset("dim dim0 dim1 start_dim end_dim".split())
_METADATA = {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad"}


class _Spelling(NamedTuple):
    """The information in a target's name, without its arguments."""

    name: str
    inplace: bool
    method: bool


@functools.lru_cache(maxsize=4096)
def _spelling(op: str, target: Any) -> _Spelling | None:
    """Return the canonical name of a call to PyTorch, without distinguishing overloads; None for anything else."""
    raw = (
        target if op == "call_method" else _function_name(target) if op == "call_function" else None
    )
    if raw is None:
        return None
    if raw in INPLACE_OPERATORS and target is getattr(operator, raw, None):
        return _Spelling(INPLACE_OPERATORS[raw], True, False)
    inplace = raw.endswith("_") and not raw.endswith("__") and raw not in SIGNATURES
    name = raw[:-1] if inplace else raw
    name = _ALIASES.get(name, name)
    return _Spelling(name, inplace or name == "setitem", op == "call_method")


def target_name(target: Any) -> str:
    """Return the name of the method or function that a node calls, not made canonical; empty if it has none."""
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def is_operator(node: fx.Node) -> bool:
    """Whether a node calls an operator of this package."""
    return compat.is_overload(node.target) and node.target.namespace == NAMESPACE


def is_plain(target: Any) -> bool:
    """Whether a function belongs to PyTorch, Python or the entmax package, so that its name shows which arguments it
    writes. Dynamo's wrappers of NumPy functions do not count."""
    module = getattr(target, "__module__", "") or ""
    if module in _ENTMAX:
        return True
    return module.split(".")[0] in _MODULES and module != compat.NUMPY_WRAPPERS


def _function_name(target: Any) -> str | None:
    if compat.is_overload(target):
        namespace, name = compat.schema(target).name.split("::")
        if namespace == "sparse_inductor" and name == "entmax":
            return "entmax_op"
        return name if namespace in ("aten", "prims") else None
    if compat.is_packet(target):
        if str(target) == "sparse_inductor.entmax":
            return "entmax_op"
        return target.__name__ if str(target).startswith("aten.") else None
    if compat.is_higher_order(target):
        name = str(target)
        return name if name == "autograd_function_apply" else None
    module = getattr(target, "__module__", "") or ""
    if module in _ENTMAX:
        return getattr(target, "__name__", None)
    if not is_plain(target) or module.startswith("torch.ops"):
        return None
    return getattr(target, "__name__", None)


def stored(node: fx.Node) -> fx.Node:
    """Return the node whose tensor holds the result of a call: the target of an assignment, else the call itself."""
    return node.args[0] if name_of(node) == "setitem" else node


def name_of(node: fx.Node) -> str | None:
    """Return the canonical name, at a fraction of the cost of `canonical`. The arguments may still fail to bind."""
    spelling = _spelling(node.op, node.target)
    if spelling is None or spelling.name in _BY_ARGUMENT or "rounding_mode" in node.kwargs:
        call = canonical(node)
        return None if call is None else call.name
    return spelling.name


def canonical(node: fx.Node) -> Call | None:
    """Return the canonical call of a node, or None for placeholders, foreign functions and unknown names."""
    spelling = _spelling(node.op, node.target)
    if spelling is None:
        return None
    name, inplace = spelling.name, spelling.inplace
    args, kwargs = node.args, dict(node.kwargs)
    inplace |= bool(kwargs.pop("inplace", False)) or "out" in kwargs
    kwargs.pop("out", None)
    if name == "getattr" and len(args) > 1:
        if args[1] in ("T", "mT", "H", "mH"):
            return Call(args[1], {"input": args[0]})
        known = args[1] in _METADATA
        return Call("metadata", {"input": args[0], "name": args[1]}) if known else None
    if name in _METADATA_CALLS:
        return Call("metadata", {"input": args[0], "name": name}) if args else None
    if (mode := kwargs.pop("rounding_mode", None)) is not None:
        name = f"div_{mode}"  # so that "div" is exact
    if name in ("max", "min"):
        name, args, kwargs = _extremum(name, args, kwargs)
    if name == "einsum":
        args = _with_equation(args)
    if name in _SPLITS and args and isinstance(fake(args[0]), torch.Tensor):
        how = [*args[1:], *kwargs.values()]
        args, kwargs = (args[0], *how, min(_SPLITS[name], fake(args[0]).dim() - 1)), {}
        name = "tensor_split"
    if name in _CATS and args and isinstance(args[0], (tuple, list)):
        values = [fake(t) for t in args[0]]
        if all(isinstance(v, torch.Tensor) and v.dim() > max(1, _CATS[name]) for v in values):
            name, args = "cat", (args[0], _CATS[name])
    if name == "where" and spelling.method:
        args = (args[1], args[0], *args[2:]) if len(args) > 1 else args
        if "condition" in kwargs and args:
            kwargs["input"], args = args[0], ()
    if (at := trailing_inplace(name, args)) is not None:  # F.relu(x, True)
        inplace, args = inplace or bool(args[at]), args[:at]
    if name == "view" and ("dtype" in kwargs or torch.dtype in map(type, args)):
        return None  # the same bits as other numbers
    bound = bind(name, args, kwargs)
    if bound is not None and any(isinstance(bound[d], fx.Node) for d in _DIMS.intersection(bound)):
        return None  # the graph computes the dimension, so it is unknown here
    if bound is not None and name == "einsum":
        if _only_multiplies(**bound):
            name, bound = "mul", dict(zip(("input", "other"), bound["operands"]))
        elif (dims := _reordered(**bound)) is not None:
            name, bound = "permute", {"input": bound["operands"][0], "dims": dims}
    return None if bound is None else Call(name, bound, inplace)


def trailing_inplace(name: str, args: tuple[Any, ...]) -> int | None:
    """Return the position of `inplace` among positional arguments, or None."""
    at = len(args) - 1
    given = at >= TRAILING_INPLACE.get(name, at + 1) and isinstance(args[at], bool)
    return at if given else None


def _with_equation(args: tuple) -> tuple:
    """Convert einsum arguments of the form (operand, axis numbers, ..., axis numbers of the result) to an equation and
    operands. Returns them unchanged where the graph computes one of these numbers."""
    if not args or isinstance(args[0], str):
        return args
    operands, axes, out = args[: len(args) // 2 * 2 : 2], args[1::2], args[-1:] * (len(args) % 2)
    if any(isinstance(n, fx.Node) for numbers in (*axes, *out) for n in numbers):
        return args
    equation = "->".join([",".join(map(_letters, axes)), *map(_letters, out)])
    return (equation, *operands)


def _letters(axes: Iterable[Any]) -> str:
    """Return the letters that torch.einsum assigns to axis numbers."""
    letters = string.ascii_uppercase + string.ascii_lowercase
    return "".join("..." if n is Ellipsis else letters[n] for n in axes)


def _only_multiplies(equation: Any, operands: tuple = ()) -> bool:
    """Whether an einsum broadcasts two operands as `*` does and sums over nothing: "bsn,bsn->bsn", "...n,n->...n"."""
    if len(operands) != 2 or not isinstance(equation, str) or "->" not in equation:
        return False
    inputs, out = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    letters = out.removeprefix("...")
    if "." in letters or len(set(letters)) != len(letters) or len(terms) != 2:
        return False
    return any(a == out and out.endswith(b) for a, b in (terms, terms[::-1]))


def _reordered(equation: Any, operands: tuple = ()) -> tuple[int, ...] | None:
    """Return the permutation that an einsum of one operand applies, if it does nothing else: "bsv->bvs"."""
    if len(operands) != 1 or not isinstance(equation, str) or "->" not in equation:
        return None
    axes, out = equation.replace(" ", "").split("->")
    if "." in axes or len(set(axes)) != len(axes) or sorted(axes) != sorted(out):
        return None
    return tuple(axes.index(letter) for letter in out)


def _extremum(name: str, args: tuple, kwargs: dict) -> tuple[str, tuple, dict]:
    """Tell apart the three functions that torch.max, like torch.min, stands for."""
    second = args[1] if len(args) > 1 else None
    if "other" in kwargs or (isinstance(fake(second), torch.Tensor)):
        return name + "imum", args, kwargs
    if second is not None or "dim" in kwargs or "axis" in kwargs:
        return name + "_dim", args, kwargs
    return name + "_all", args, kwargs
