"""Access to Dynamo: the compile under way, captured graphs, guards and cache entries."""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import fx


def anything_compiled() -> bool:
    """Whether Dynamo holds a frame compiled since the process began or was last reset."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return False
    from torch._dynamo import convert_frame

    return bool(convert_frame.FRAME_COUNTER) or bool(convert_frame.output_codes.seen)


def current_compile() -> object | None:
    """Return the compile under way in this thread, the same object for all its graphs; None if there is none."""
    from torch._guards import CompileContext

    return CompileContext.try_get()


def attempt(compile: object | None) -> int:
    """Return how often Dynamo has restarted a compile."""
    return getattr(compile, "attempt", 0)


def current_frame() -> int | None:
    """Return a number for the Python frame under compilation, the same each time it is compiled; None outside Dynamo,
    and if its guards have to be serialised."""
    from torch._dynamo import config
    from torch._dynamo.symbolic_convert import InstructionTranslator

    compile_id = getattr(current_compile(), "compile_id", None)
    if getattr(config, "caching_precompile", False):
        return None
    if compile_id is None or getattr(InstructionTranslator, "current_tx", None) is None:
        return None
    try:
        InstructionTranslator.current_tx()
    except AttributeError:  # compiled without Dynamo: exported, or by hand
        return None
    return compile_id.frame_id


def current_code() -> types.CodeType | None:
    """Return the code of the frame under compilation; None where `current_frame` is None."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return None if current_frame() is None else InstructionTranslator.current_tx().f_code


_resets = 0


def resets() -> int:
    """Return a number that changes with each `torch._dynamo.reset()`, which is detected by an entry that it clears."""
    global _resets
    from torch._dynamo.utils import warn_once_cache

    if __name__ not in warn_once_cache:
        warn_once_cache.add(__name__)
        _resets += 1
    return _resets


def held_by_a_module(node: fx.Node) -> bool:
    """Whether an input of a graph is a tensor that Dynamo found in a module, or a tensor marked as static."""
    return "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or ())


def given_class(node: fx.Node) -> type:
    """Return the class of the tensor that a graph received at an input, whereas its fake tensor usually has a plain
    class; torch.Tensor for parameters."""
    arg = node.meta.get("grapharg")
    example = None if arg is None else arg.example
    if isinstance(example, torch.Tensor) and not isinstance(example, torch.nn.Parameter):
        return type(example)
    return torch.Tensor


def may_recompile(code: types.CodeType | None) -> bool:
    """Whether the program allows Dynamo to recompile a frame of this code, and less than half of the cache entries of
    `recompile_limit` are used."""
    from torch._dynamo import config, eval_frame

    if eval_frame._stance.stance != "default" or config.error_on_recompile:
        return False
    if code is None:
        return True
    return len(eval_frame._debug_get_cache_entry_list(code)) < config.recompile_limit // 2


def add_guard(holds: Callable[[], bool], text: str, counts: bool = True) -> None:
    """Add a guard to the frame under compilation: `holds()`, evaluated at each call. counts: whether the cache entry
    counts towards `recompile_limit`."""
    from torch._dynamo.guards import install_guard
    from torch._dynamo.symbolic_convert import InstructionTranslator

    def create(builder: Any, guard: Any) -> None:
        manager = builder.get_guard_manager(guard)
        # Since torch 2.12, the third argument is the user's stack.
        extra = manager.add_lambda_guard.__doc__.count(",") - 2
        manager.add_lambda_guard(lambda _: holds(), [text], *[None] * extra)
        if not counts:
            # Dynamo does not count cache entries that are bound to an object which the frame does not have.
            getattr(builder, "id_matched_objs", {})[text] = weakref.ref(add_guard)

    source = InstructionTranslator.current_tx().import_source("torch")
    install_guard(source.make_guard(create))


def add_buffer(
    module: fx.GraphModule, name: str, value: torch.Tensor, kept: tuple[str, str, str]
) -> None:
    """Add a tensor as a buffer to a graph that Dynamo has captured. kept: where guards find the tensor, as (module,
    name of a dict in it, key)."""
    from torch._dynamo.source import AttrSource, GetItemSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # A persistent buffer: the names of other buffers are a set, whose order would affect AOTAutograd's cache key.
    module.register_buffer(name, value)
    sources = getattr(module, "_param_name_to_source", None)
    if sources is not None:
        imported = InstructionTranslator.current_tx().import_source(kept[0])
        sources[name] = GetItemSource(AttrSource(imported, kept[1]), kept[2])


def reset_dynamo() -> None:
    """Forget everything Dynamo has compiled."""
    torch._dynamo.reset()


class GraphEnd(NamedTuple):
    """The reason why Dynamo ended a graph; `stack` is the user's stack, as (file, line, text), innermost last."""

    broke: bool
    reason: str
    stack: tuple[tuple[str, int, str], ...]


def graph_end(gm: Any) -> GraphEnd | None:
    """Return why Dynamo ended the graph; None for a graph that is not a frame's (a checkpoint body)."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None:
        return None
    stack = tuple((f.filename, f.lineno or 0, f.line or "") for f in reason.user_stack or ())
    return GraphEnd(bool(reason.graph_break), str(reason.reason), stack)


def in_ddp_bucket(gm: Any) -> bool:
    """Whether DistributedDataParallel's optimizer has split the graph for one bucket from Dynamo's graph."""
    end = graph_end(gm)
    return end is not None and end.reason.startswith("DDPOptimizer")


def uncompiled(fn: Any) -> Any:
    """Return the function or module that `torch.compile` was given, if `fn` is its result; else `fn`.

    Raises TypeError for a class, which `torch.compile` would change, and for what cannot be called.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(fn, type) or not callable(fn):
        raise TypeError(f"expected a function or a module, got {fn!r}")
    if isinstance(fn, OptimizedModule):
        return fn._orig_mod
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def fresh_capture() -> contextlib.AbstractContextManager[None]:
    """Return settings under which a function is captured again although the process has compiled it before, and under
    which the capture does not influence later compiles (automatic dynamic shapes, the recompile limit)."""
    from torch._dynamo import config

    wanted = {
        "recompile_limit": 1 << 20,
        "accumulated_recompile_limit": 1 << 20,
        "automatic_dynamic_shapes": False,
        "suppress_errors": False,
    }
    return config.patch({name: value for name, value in wanted.items() if name in config._config})


def keep_in_graph(fn: Any) -> Any:
    """Make a call of `fn`, a module's function, one node in Dynamo's graphs; the result undoes exactly that.

    `torch.compiler.allow_in_graph` also records that the user has asked for it: if a backend cannot compile such a
    graph, Dynamo then raises instead of falling back to a graph break. The rule is entered by name, too, because Dynamo
    rebuilds its table of functions from names when a process group is initialised.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import TorchInGraphFunctionVariable

    name = f"{fn.__module__}.{fn.__qualname__}"
    trace_rules.manual_torch_name_rule_map[name] = TorchInGraphFunctionVariable
    trace_rules.get_torch_obj_rule_map()[fn] = TorchInGraphFunctionVariable

    def undo() -> None:
        trace_rules.manual_torch_name_rule_map.pop(name, None)
        trace_rules.get_torch_obj_rule_map().pop(fn, None)

    return undo


def substitute_in_graph(fn: Any, traced: Any) -> Any:
    """Make Dynamo trace `traced` where `fn` is called; the result undoes exactly that.

    If `fn` already has another substitute, it is kept. torch can only add substitutes, so undoing removes the entries
    from torch's tables.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import PolyfilledFunctionVariable
    from torch._dynamo.variables.builder import VariableBuilder

    try:
        wrapped = torch.compiler.substitute_in_graph(fn)(traced)
    except (TypeError, ValueError):  # substituted already, or another version's signature
        return lambda: None

    def undo() -> None:
        for function in (fn, wrapped):
            VariableBuilder._id_dispatch().pop(id(function), None)
            trace_rules._polyfilled_function_ids.remove(id(function))
            trace_rules.get_torch_obj_rule_map().pop(function, None)
            PolyfilledFunctionVariable._get_polyfill_handlers().pop(function, None)

    return undo


_joined: WeakSet[Any] = WeakSet()
_refused: WeakSet[Any] = WeakSet()


def may_join() -> bool:
    """Whether Dynamo may continue where it would end the graph: not if the compile under way has failed after doing so,
    and not for a backend of torch that does not run Inductor's passes, such as "aot_eager"."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    compile = current_compile()
    if compile in _refused:
        return False
    if current_frame() is not None:
        backend = InstructionTranslator.current_tx().output.compiler_fn
        backend = getattr(backend, "compiler_fn", backend)
        if getattr(backend, "__module__", None) == "torch._dynamo.backends.debugging":
            return False
        _joined.add(compile)
    return True


def part_what_fails_joined() -> Callable[[], None]:
    """Make Dynamo restart a frame, and end its graphs as usual, if it has continued (`may_join`) and then cannot trace
    the frame, unless the program requires a single graph; the result undoes this."""
    from torch._dynamo import exc
    from torch._dynamo.symbolic_convert import InstructionTranslator

    inherited: Any = super(InstructionTranslator, InstructionTranslator).step

    def step(self: Any) -> bool:
        try:
            return bool(inherited(self))
        except Exception as error:
            failed = exc.TorchRuntimeError, exc.UncapturedHigherOrderOpError
            dynamo_acts = isinstance(error, exc.TorchDynamoException) and not isinstance(
                error, failed
            )
            if dynamo_acts or self.one_graph or current_compile() not in _joined:
                raise
            _join_no_more(self)
            raise exc.RestartAnalysis(restart_reason=str(error)) from error

    own: Any = InstructionTranslator
    own.step = step

    def undo() -> None:
        if vars(own).get("step") is step:
            del own.step

    return undo


def _join_no_more(tracing: Any) -> None:
    """Prepare the compile under way for a restart without `may_join`."""
    compile = current_compile()
    _joined.discard(compile)
    _refused.add(compile)
    tracing.speculation_log.clear()


def has_joined() -> bool:
    """Whether Dynamo has continued (`may_join`) in the compile under way, and may still end the graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if current_frame() is None or current_compile() not in _joined:
        return False
    tracing = InstructionTranslator.current_tx()
    return not (tracing.one_graph or tracing.error_on_graph_break)


def end_graph_where_dynamo_would(reason: str) -> None:
    """Make Dynamo, which is calling the backend, restart and end the graph where it does by default."""
    from torch._dynamo import exc
    from torch._dynamo.symbolic_convert import InstructionTranslator

    _join_no_more(InstructionTranslator.current_tx())
    # The only restart exception that Dynamo accepts from a backend.
    raise exc.TensorifyScalarRestartAnalysis(restart_reason=reason)


def trace_class_methods() -> Any:
    """Make Dynamo trace autograd Functions whose forward or backward is a class method; the result undoes this.

    If a gradient is needed, torch 2.13 passes the class to them twice, cannot bind the arguments, and ends the graph.
    So does torch 2.11, but it is not changed, because it loses the gradient of a bisection that it traces. A torch
    version without the method `prepare_fn_vt` is not changed, either.
    """
    if torch.__version__ < (2, 13):
        return lambda: None
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import UserDefinedClassVariable, UserFunctionVariable
    from torch._dynamo.variables import higher_order_ops as hops

    variable = getattr(hops, "AutogradFunctionApplyVariable", None)
    original = getattr(variable, "prepare_fn_vt", None)
    if variable is None or original is None:
        return lambda: None

    def prepare_fn_vt(self: Any, tx: Any, ctx: Any, method_name: str, args: Any) -> Any:
        fn = self.fwd_fn if method_name == "forward" else self.bwd_fn
        of_class = isinstance(fn, types.MethodType) and isinstance(fn.__self__, type)
        if not of_class or not may_join():
            return original(self, tx, ctx, method_name, args)
        method = self.parent_source and AttrSource(self.parent_source, member=method_name)
        function = UserFunctionVariable(
            fn.__func__, source=method and AttrSource(method, "__func__")
        )
        return function, [UserDefinedClassVariable(fn.__self__), ctx, *args]

    variable.prepare_fn_vt = prepare_fn_vt

    def undo() -> None:
        if variable.prepare_fn_vt is prepare_fn_vt:
            variable.prepare_fn_vt = original

    return undo


def hidden_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the keyword arguments of a DTensor method that torch 2.11 keeps in a closure."""
    cells = getattr(node.target, "__closure__", None) or ()
    names = getattr(getattr(node.target, "__code__", None), "co_freevars", ())
    held = dict(zip(names, (cell.cell_contents for cell in cells)))
    positional, keywords = held.get("args_as_value", ()), held.get("kwargs_as_value", {})
    return {**({"grad_placements": positional[0]} if positional else {}), **keywords}
