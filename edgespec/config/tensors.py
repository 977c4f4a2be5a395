"""Which tensors a decoder layer has: name -> shape, from its description alone.

Bases and the drafts of every method take their layers from here. Knows no files and
no layouts of drafts.
"""

from __future__ import annotations

from edgespec.config.values import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    LinearAttentionConfig,
    MlpSpec,
    NormNames,
)

Tensors = dict[str, tuple[int, ...]]
_Linears = dict[str, tuple[int, int, bool]]  # name -> rows, columns, whether there is a bias


def layer_tensors(
    layer: LayerSpec, hidden_size: int, prefix: str, attention_in: int | None = None
) -> Tensors:
    """Name -> shape of one layer's tensors under `prefix`; `attention_in` is the width that q, k
    and v read where it is not the hidden size."""
    if isinstance(layer.mixer, AttentionSpec):
        mixer = attention_tensors(layer.mixer, hidden_size, attention_in or hidden_size)
    else:
        mixer = delta_net_tensors(layer.mixer, hidden_size)
    named = mixer | _with_biases(_mlp_linears(layer.mlp, hidden_size))
    named |= {f"{name}.weight": (hidden_size,) for name in norms_of(layer.norm_names)}
    return {f"{prefix}.{name}": shape for name, shape in named.items()}


def norms_of(names: NormNames) -> tuple[str, ...]:
    """The layer's norms, in the order in which they are computed."""
    places = (names.before_mixer, names.after_mixer, names.before_mlp, names.after_mlp)
    return tuple(name for name in places if name is not None)


def attention_tensors(attention: AttentionSpec, hidden_size: int, width: int) -> Tensors:
    """The tensors under `self_attn`, whose q, k and v read rows of `width` elements."""
    queries, keys = qkv_rows(attention)[:2]
    bias = attention.qkv_bias
    linears: _Linears = {
        "self_attn.q_proj": (queries, width, bias),
        "self_attn.k_proj": (keys, width, bias),
        "self_attn.v_proj": (keys, width, bias),
    }
    if attention.fused_qkv:
        linears = {"self_attn.qkv_proj": (queries + 2 * keys, width, bias)}
    mixed = attention.num_heads * attention.head_dim
    linears["self_attn.o_proj"] = (hidden_size, mixed, attention.o_bias)
    norms = ("self_attn.q_norm", "self_attn.k_norm") if attention.qk_norm else ()
    return _with_biases(linears) | {f"{n}.weight": (attention.head_dim,) for n in norms}


def qkv_rows(attention: AttentionSpec) -> tuple[int, int, int]:
    """Rows of q, k and v; with gates, q has those of the gates as well."""
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    return (2 * queries if attention.gated else queries), keys, keys


def delta_net_tensors(linear: LinearAttentionConfig, hidden_size: int) -> Tensors:
    """The tensors under `linear_attn`."""
    keys = linear.num_key_heads * linear.key_head_dim
    values = linear.num_value_heads * linear.value_head_dim
    named: Tensors = {
        "in_proj_qkv.weight": (2 * keys + values, hidden_size),
        "in_proj_z.weight": (values, hidden_size),
        "in_proj_b.weight": (linear.num_value_heads, hidden_size),
        "in_proj_a.weight": (linear.num_value_heads, hidden_size),
        "conv1d.weight": (2 * keys + values, 1, linear.conv_kernel),
        "dt_bias": (linear.num_value_heads,),
        "A_log": (linear.num_value_heads,),
        "norm.weight": (linear.value_head_dim,),
        "out_proj.weight": (hidden_size, values),
    }
    return {f"linear_attn.{name}": shape for name, shape in named.items()}


def _mlp_linears(mlp: MlpSpec, hidden_size: int) -> _Linears:
    inner = mlp.intermediate_size
    if mlp.experts is not None:
        return _experts_linears(mlp, mlp.experts, hidden_size)
    down: _Linears = {"mlp.down_proj": (hidden_size, inner, mlp.bias)}
    if mlp.fused_gate_up:
        return {"mlp.gate_up_proj": (2 * inner, hidden_size, mlp.bias)} | down
    parts = ("mlp.gate_proj", "mlp.up_proj")
    return dict.fromkeys(parts, (inner, hidden_size, mlp.bias)) | down


def _experts_linears(mlp: MlpSpec, experts: ExpertsSpec, hidden_size: int) -> _Linears:
    """The router, the experts, and the one that all rows take."""
    linears: _Linears = {"mlp.gate": (experts.count, hidden_size, False)}
    widths = {f"mlp.experts.{e}": mlp.intermediate_size for e in range(experts.count)}
    if experts.shared_size:
        linears["mlp.shared_expert_gate"] = (1, hidden_size, False)
        widths["mlp.shared_expert"] = experts.shared_size
    for name, inner in widths.items():
        linears |= dict.fromkeys(
            (f"{name}.gate_proj", f"{name}.up_proj"), (inner, hidden_size, mlp.bias)
        )
        linears[f"{name}.down_proj"] = (hidden_size, inner, mlp.bias)
    return linears


def _with_biases(linears: _Linears) -> Tensors:
    tensors: Tensors = {}
    for name, (rows, columns, bias) in linears.items():
        tensors[f"{name}.weight"] = (rows, columns)
        if bias:
            tensors[f"{name}.bias"] = (rows,)
    return tensors
