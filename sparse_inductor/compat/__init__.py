"""The only folder that touches torch's private API or asks for its version.

Private modules that are documented for use outside of torch (`torch.utils._pytree`,
`torch.utils._python_dispatch`) may be used anywhere; `tests/test_private_parts.py` checks all others.

Each function hides one detail that torch may move or that differs between its versions. torch's
private modules are imported inside the functions, because `TORCH_LOGS=+sparse_inductor` imports
this package during `import torch`.
"""

from .dynamo import (
    GraphEnd,
    add_buffer,
    add_guard,
    anything_compiled,
    attempt,
    current_code,
    current_compile,
    current_frame,
    end_graph_where_dynamo_would,
    fresh_capture,
    given_class,
    graph_end,
    has_joined,
    held_by_a_module,
    hidden_arguments,
    in_ddp_bucket,
    keep_in_graph,
    may_join,
    may_recompile,
    part_what_fails_joined,
    reset_dynamo,
    resets,
    substitute_in_graph,
    trace_class_methods,
    uncompiled,
)
from .graphs import copy_graph, copy_graph_module, graph_text
from .inductor import (
    arguments_of_node,
    call_extern_kernels,
    compile_graph,
    compiling_ahead,
    pre_grad_passes,
    runs_pre_grad_passes,
    settled_inputs,
    slots_take_lists,
)
from .logs import count, sparse_graph_breaks, trace_artifact, untraceable
from .operators import (
    INTERNAL_MODULES,
    NUMPY_WRAPPERS,
    fused_attention,
    is_data,
    is_higher_order,
    is_overload,
    is_packet,
    marks_every_result,
    schema,
    schemas,
)
from .runtime import (
    allocator,
    asked_for_shapes,
    autograd_on,
    below_autograd,
    checkpoint_under_way,
    clamp_has_a_slope_at_its_bounds,
    computes_as_tensors_do,
    coo_entries,
    cuda_driver,
    cuda_error,
    current_device,
    device_type_code,
    dtype_code,
    exporting,
    forward_ad_active,
    functional_mode,
    is_view,
    keeps_operators,
    launch_settings,
    lazy_clone,
    marked_as_parameter,
    modes_active,
    observed,
    outside_modes,
    plain_when_traced,
    product_functions,
    raw_stream,
    storage_key,
    stream_getter,
    symbolic_sizes,
    transforms_active,
    unobserved,
    views_untracked,
    works_beside_captures,
)
from .settings import (
    SavedSetting,
    has_setting,
    inductor_cache_folder,
    patched_settings,
    ranks_compile_alike,
    restore_setting,
    save_setting,
    set_setting,
    setting,
)
from .shapes import ShapeState, discarding_unbacked, is_data_dependent, shape_env_of
