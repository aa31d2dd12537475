"""What Dynamo captured, and what it keeps between compiles."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any
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
    """The compile under way in this thread, the same object for all its graphs; None outside."""
    from torch._guards import CompileContext

    return CompileContext.try_get()


def current_frame() -> int | None:
    """A number for the Python frame under compilation, the same each time it is compiled; None outside Dynamo, and
    where its guards have to be written to a file."""
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
    """The code of that frame; None outside Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return None if current_frame() is None else InstructionTranslator.current_tx().f_code


_resets = 0


def resets() -> int:
    """A number that is another one after each `torch._dynamo.reset()`: seen by what that clears."""
    global _resets
    from torch._dynamo.utils import warn_once_cache

    if __name__ not in warn_once_cache:
        warn_once_cache.add(__name__)
        _resets += 1
    return _resets


def held_by_a_module(node: fx.Node) -> bool:
    """Whether an input of a graph is a tensor that Dynamo found in a module, or that is said to stay where it is."""
    return "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or ())


def given_class(node: fx.Node) -> type:
    """The class of the tensor that a graph is compiled for at an input, whose fake is mostly a plain tensor; a
    parameter's own class changes nothing."""
    arg = node.meta.get("grapharg")
    example = None if arg is None else arg.example
    if isinstance(example, torch.Tensor) and not isinstance(example, torch.nn.Parameter):
        return type(example)
    return torch.Tensor


def may_recompile(code: types.CodeType | None) -> bool:
    """Whether the program lets Dynamo compile a frame of this code anew, and leaves room for it: less than half of the
    versions that Dynamo keeps of a frame are there."""
    from torch._dynamo import config, eval_frame

    if eval_frame._stance.stance != "default" or config.error_on_recompile:
        return False
    if code is None:
        return True
    return len(eval_frame._debug_get_cache_entry_list(code)) < config.recompile_limit // 2


def add_guard(holds: Callable[[], bool], text: str, counts: bool = True) -> None:
    """Have the code of the frame under compilation run only where `holds()` says so, asked at each call. counts:
    whether the code is one of those that `recompile_limit` limits."""
    from torch._dynamo.guards import install_guard
    from torch._dynamo.symbolic_convert import InstructionTranslator

    def create(builder: Any, guard: Any) -> None:
        manager = builder.get_guard_manager(guard)
        # A stack of the user's is a third argument since torch 2.12.
        extra = manager.add_lambda_guard.__doc__.count(",") - 2
        manager.add_lambda_guard(lambda _: holds(), [text], *[None] * extra)
        if not counts:
            # Dynamo does not count code that is bound to an object which the frame does not have.
            getattr(builder, "id_matched_objs", {})[text] = weakref.ref(add_guard)

    source = InstructionTranslator.current_tx().import_source("torch")
    install_guard(source.make_guard(create))


def add_buffer(
    module: fx.GraphModule, name: str, value: torch.Tensor, kept: tuple[str, str, str]
) -> None:
    """Give a graph that Dynamo has captured a tensor of its own; kept: (module, its dict, the key)
    that holds it."""
    from torch._dynamo.source import AttrSource, GetItemSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # Names of buffers that are not kept are a set, whose order would be in the key of AOTAutograd's cache.
    module.register_buffer(name, value)
    sources = getattr(module, "_param_name_to_source", None)
    if sources is not None:
        imported = InstructionTranslator.current_tx().import_source(kept[0])
        sources[name] = GetItemSource(AttrSource(imported, kept[1]), kept[2])


def reset_dynamo() -> None:
    """Forget everything Dynamo has compiled."""
    torch._dynamo.reset()


@dataclasses.dataclass(frozen=True)
class GraphEnd:
    """Why Dynamo ended a graph; `stack` is the user's, as (file, line, text), innermost last."""

    broke: bool
    reason: str
    stack: tuple[tuple[str, int, str], ...]


def graph_end(gm: Any) -> GraphEnd | None:
    """Why Dynamo ended the graph; None for one that is not a frame's (a checkpoint body)."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None:
        return None
    stack = tuple((f.filename, f.lineno or 0, f.line or "") for f in reason.user_stack or ())
    return GraphEnd(bool(reason.graph_break), str(reason.reason), stack)


def in_ddp_bucket(gm: Any) -> bool:
    """Whether the graph is what DistributedDataParallel's optimizer made of one bucket's part of Dynamo's."""
    end = graph_end(gm)
    return end is not None and end.reason.startswith("DDPOptimizer")


def uncompiled(fn: Any) -> Any:
    """The function or module that `torch.compile` was given, if `fn` came from it."""
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(fn, OptimizedModule):
        return fn._orig_mod
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def fresh_capture() -> contextlib.AbstractContextManager[None]:
    """Settings under which a function is captured anew although the process compiled it before, and
    that keep what is captured from influencing later compiles (automatic dynamic shapes, the
    recompile limit)."""
    from torch._dynamo import config

    wanted = {
        "recompile_limit": 1 << 20,
        "accumulated_recompile_limit": 1 << 20,
        "automatic_dynamic_shapes": False,
        "suppress_errors": False,
    }
    return config.patch({name: value for name, value in wanted.items() if name in config._config})


def keep_in_graph(fn: Any) -> Any:
    """Have Dynamo make a call of `fn`, a module's function, one node; the result undoes exactly that.

    `torch.compiler.allow_in_graph` says also that the user has asked for it: where a backend cannot compile such a
    graph, Dynamo raises instead of falling back to a graph break. The rule is entered by name, too: Dynamo's table of
    functions is made anew from names when a process group is initialised.
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
    """Have Dynamo trace `traced` where `fn` is called; the result undoes exactly that.

    A function that somebody else has substituted already keeps his substitute. torch can only add
    a substitute, so undoing takes the entries out of the tables that it goes into.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import PolyfilledFunctionVariable
    from torch._dynamo.variables.builder import VariableBuilder

    try:
        wrapped = torch.compiler.substitute_in_graph(fn)(traced)
    except (TypeError, ValueError):  # substituted already, or an other version's signature
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
    """Whether Dynamo may go on where it would end the graph: not where the compile under way has failed so, and not for
    a backend of torch's that runs no pass of Inductor's, as "aot_eager"."""
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
    """Have Dynamo begin a frame anew, and end its graphs as it does by itself, where it has gone on (`may_join`) and
    then cannot trace the frame, unless the program wants one graph; the result undoes it."""
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
    """What the compile under way has to know before it begins anew."""
    compile = current_compile()
    _joined.discard(compile)
    _refused.add(compile)
    tracing.speculation_log.clear()


def has_joined() -> bool:
    """Whether Dynamo has gone on so in the compile under way, and may still end the graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if current_frame() is None or current_compile() not in _joined:
        return False
    tracing = InstructionTranslator.current_tx()
    return not (tracing.one_graph or tracing.error_on_graph_break)


def end_graph_where_dynamo_would(reason: str) -> None:
    """Have Dynamo, which asks for a graph's code, begin anew and end the graph where it does by itself."""
    from torch._dynamo import exc
    from torch._dynamo.symbolic_convert import InstructionTranslator

    _join_no_more(InstructionTranslator.current_tx())
    # The only one that Dynamo lets through from a backend.
    raise exc.TensorifyScalarRestartAnalysis(restart_reason=reason)


def trace_class_methods() -> Any:
    """Have Dynamo trace autograd Functions whose forward or backward is a class method; the result undoes it.

    torch 2.13 passes the class to them twice where a gradient is wanted, cannot bind the arguments, and ends the graph.
    So does torch 2.11, which has to go on doing so: of a bisection that it traces it loses the gradient. A torch
    without the method that does so is left alone, too.
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
    """The keyword arguments of a DTensor's method that torch 2.11 keeps in a closure of its own."""
    cells = getattr(node.target, "__closure__", None) or ()
    names = getattr(getattr(node.target, "__code__", None), "co_freevars", ())
    held = dict(zip(names, (cell.cell_contents for cell in cells)))
    positional, keywords = held.get("args_as_value", ()), held.get("kwargs_as_value", {})
    return {**({"grad_placements": positional[0]} if positional else {}), **keywords}
