"""Access to Inductor: its pass slots, its compilation, and its code generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .settings import patched_settings, setting


def slots_take_lists() -> bool:
    """Whether a pass slot holds several passes (2.13) or one callable (2.11)."""
    from torch._inductor import custom_graph_pass

    return hasattr(custom_graph_pass, "get_custom_graph_passes")


def runs_pre_grad_passes() -> bool:
    """Whether the user has left Inductor's pre-grad passes on."""
    return bool(setting("use_pre_grad_passes"))


def pre_grad_passes(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """Run Inductor's passes before autograd on a Dynamo graph: its own and those in the slot."""
    from torch._inductor.compile_fx import _recursive_pre_grad_passes

    return _recursive_pre_grad_passes(gm, example_inputs)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    codegen: bool = True,
    see: Callable[[fx.Graph], Any] = lambda graph: None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph as Inductor does, with caches off.

    Without `codegen`, all passes and AOTAutograd run; the resulting graphs of ATen operations are passed to `see` and
    executed without generating code.
    """
    from functorch.compile import make_boxed_func
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    def as_it_is(inner: fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
        see(inner.graph)
        return make_boxed_func(inner.forward)

    # With fallback_random a seeded program draws the same numbers as eager.
    with (
        patched_settings(
            force_disable_caches=True,
            fx_graph_cache=False,
            fallback_random=True,
            pre_grad_pass_timing="early",
        ),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        if codegen:
            return compile_fx(gm, list(example_inputs))
        return compile_fx(gm, list(example_inputs), inner_compile=as_it_is)


def compiling_ahead() -> bool:
    """Whether AOTInductor compiles. Its result is called without autograd, whatever the grad mode of the compile."""
    from torch._inductor.virtualized import V

    return V.aot_compilation is True


def call_extern_kernels(
    python_name: str, made: Callable[[Any], tuple[str, str, str] | None]
) -> None:
    """Make Inductor's Python code call an object defined in the generated module where it would call `python_name`.

    made: given the node, returns (import line, name of the object, expression that creates it), or None to leave the
    call as it is.
    """
    from torch._inductor.codegen import custom_extern_kernel_codegen as registry
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine, PythonWrapperCodegen
    from torch._inductor.virtualized import V

    def generate(node: Any, writeline: Callable[[Any], None]) -> None:
        wrapper = V.graph.wrapper_code
        # The wrapper of a subgraph does not generate a module.
        found = made(node) if type(wrapper) is PythonWrapperCodegen else None
        if found is not None:
            imported, node.python_kernel_name, expression = found
            wrapper.add_import_once(imported)
            wrapper.header.writeline(f"{node.python_kernel_name} = {expression}")
        writeline(ExternKernelAllocLine(wrapper, node))

    registry.CUSTOM_EXTERN_KERNEL_CODEGEN[python_name] = registry.CustomCodegen(python=generate)


def arguments_of_node(node: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of positional arguments of an Inductor node's operator, and its keyword arguments."""
    passed, named = node.unflatten_args(node.inputs, node.constant_args)
    return len(passed), {**node.kwargs, **named}


def settled_inputs(node: Any) -> bool:
    """Whether an Inductor node has no symbolic sizes, strides or constants among its inputs."""
    sizes = [n for t in node.inputs for n in (*t.get_size(), *t.get_stride())]
    return all(isinstance(n, int) or n.is_number for n in (*sizes, *_numbers(node.constant_args)))


def _numbers(values: Sequence[Any]) -> list[Any]:
    found = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += _numbers(value)
        elif hasattr(value, "free_symbols"):
            found.append(value)
    return found
