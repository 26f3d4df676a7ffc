"""What the shapes of an oxidizr checkpoint say about its attention and feed-forward layers.

A kind is measured on the first layer that has it; what a tensor says and what the config says must agree.
"""

from __future__ import annotations

from math import gcd

from plait.errors import ConfigError, UnsupportedModel
from plait.families.oxidizr.view import BranchPart, Shape, Tensors, View, linear
from plait.spec.model import AttentionSpec, MlaSpec, MlpSpec, MoeSpec, NormSpec

LATENT_NORM = NormSpec(1e-6)


def mla(view: View) -> BranchPart:
    """The trainer's seven matrices."""
    kv_rank = view.measure("kv_latent_dim", view.shape("w_dkv.weight", 2)[0], "w_dkv.weight")
    q_rank = view.measure("q_latent_dim", view.shape("w_dq.weight", 2)[0], "w_dq.weight")
    turned = view.measure("d_rope", view.shape("w_kr.weight", 2)[0], "w_kr.weight")
    heads = view.divide(view.shape("w_qr.weight", 2)[0], turned, "w_qr.weight", "num_attention_heads")
    view.measure("num_attention_heads", heads, "w_qr.weight")
    wide = view.shape("w_uq.weight", 2)[0]
    dim = view.divide(wide, heads, "w_uq.weight", "head_dim")
    mixer = MlaSpec(heads, None, kv_rank, dim, dim, (dim + turned) ** -0.5, turned, view.rope(turned))
    shapes = {
        "w_dkv": (kv_rank, view.hidden),
        "w_dq": (q_rank, view.hidden),
        "w_uq": (wide, q_rank),
        **dict.fromkeys(("w_uk", "w_uv"), (wide, kv_rank)),
        "w_qr": (heads * turned, view.hidden),
        "w_kr": (turned, view.hidden),
        "o": (view.hidden, wide),
    }
    tensors: Tensors = {f"{leaf}.weight": (shape, True) for leaf, shape in shapes.items()}
    return BranchPart(mixer, view.rms(), {"norm.weight": ((view.hidden,), True), **tensors})


def latent(view: View) -> BranchPart:
    """MLA in DeepSeek's shapes: the number of heads solves their equations."""
    (rows, kv_rank), all_v = view.shape("kv_b.weight", 2), view.shape("o.weight", 2)[1]
    turned = view.divide(view.shape("kv_a.weight", 2)[0] - kv_rank, 1, "kv_a.weight", "d_rope")
    low = "q_a.weight" in view
    q_rows = view.shape("q_b.weight" if low else "q.weight", 2)[0]
    heads = view.divide(q_rows - (rows - all_v), turned, "kv_b.weight", "num_attention_heads")
    nope = view.divide(rows - all_v, heads, "kv_b.weight", "the width of a key")
    v_dim = view.divide(all_v, heads, "o.weight", "the width of a value")
    view.measure("kv_latent_dim", kv_rank, "kv_b.weight")
    view.measure("d_rope", turned, "kv_a.weight")
    view.measure("num_attention_heads", heads, "kv_b.weight")
    q_rank = view.shape("q_a.weight", 2)[0] if low else None
    normed = "kv_a_norm.weight" in view or "q_a_norm.weight" in view
    mixer = MlaSpec(
        heads, q_rank, kv_rank, nope, v_dim, (nope + turned) ** -0.5, turned, view.rope(turned),
        LATENT_NORM if normed else None,
    )  # fmt: skip
    tensors: Tensors = {
        "norm.weight": ((view.hidden,), True),
        **linear("kv_a", kv_rank + turned, view.hidden),
        "kv_b.weight": ((rows, kv_rank), True),
        **linear("o", view.hidden, all_v),
        **(linear("q_a", q_rank, view.hidden) if q_rank else {}),
        **linear("q_b" if q_rank else "q", q_rows, q_rank or view.hidden),
        **({"kv_a_norm.weight": ((kv_rank,), True)} if normed else {}),
        **({"q_a_norm.weight": ((q_rank,), True)} if normed and q_rank else {}),
    }
    return BranchPart(mixer, view.rms(), tensors)


def gqa(view: View) -> BranchPart:
    q, k = view.shape("q.weight", 2)[0], view.shape("k.weight", 2)[0]
    dim = _head_dim(view, q, k)
    heads, kv_heads = q // dim, k // dim
    view.measure("num_attention_heads", heads, "q.weight")
    view.measure("num_kv_heads", kv_heads, "k.weight")
    tensors: Tensors = {
        "norm.weight": ((view.hidden,), True),
        **linear("q", q, view.hidden),
        **linear("k", k, view.hidden),
        **linear("v", k, view.hidden),
        **linear("o", view.hidden, q),
    }
    mixer = AttentionSpec(heads, kv_heads, dim, dim**-0.5, view.rope(dim))
    return BranchPart(mixer, view.rms(), tensors)


def _head_dim(view: View, q: int, k: int) -> int:
    """The width of a head: from the config, unless only one width fits the rows of q and k."""
    fits = [d for d in range(2, gcd(q, k) + 1, 2) if q % d == 0 and k % d == 0 and (q // d) % (k // d) == 0]
    given = view.facts.find
    asked = {"head_dim": given("head_dim")}
    asked |= {
        key: rows // n if rows % n == 0 else 0
        for key, rows in (("num_attention_heads", q), ("num_kv_heads", k))
        if (n := given(key))
    }
    for key, dim in asked.items():
        if dim in fits:
            return int(dim)
        if dim is not None:
            raise UnsupportedModel(
                f"{view.facts.provenance[key]} says {key} = {given(key)}, which does not fit "
                f"{view.theirs('q.weight')} [{q}, …] and {view.theirs('k.weight')} [{k}, …]: the width of a "
                f"head may be {', '.join(map(str, fits))}"
            )
    if len(fits) != 1:
        options = ", ".join(f"{q // d} (of {d})" for d in fits)
        raise ConfigError(
            f"the config gives neither num_attention_heads nor head_dim, and {view.theirs('q.weight')} "
            f"[{q}, …] with {view.theirs('k.weight')} [{k}, …] fit several: {options}; run with --set "
            "num_attention_heads=…"
        )
    return fits[0]


def mlp(view: View) -> BranchPart:
    size = view.shape("gate.weight", 2)[0]
    _ffn_size(view, size, "intermediate_size", "gate.weight")
    tensors: Tensors = {
        "norm.weight": ((view.hidden,), True),
        **linear("gate", size, view.hidden),
        **linear("up", size, view.hidden),
        **linear("down", view.hidden, size),
    }
    return BranchPart(MlpSpec(size), view.rms(), tensors)


def _ffn_size(view: View, size: int, key: str, leaf: str) -> None:
    """Measure a feed-forward's width. `intermediate_size` is one key for two kinds of layers: either fits."""
    gates = {
        n: shape for n, shape in view.shapes.items() if n.endswith("gate.weight") and ".shared." not in n
    }
    sizes = {_size(name, shape, view.hidden) for name, shape in gates.items()}
    if view.facts.find(key) not in sizes:
        view.measure(key, size, leaf)


def _size(name: str, gate: Shape, hidden: int) -> int:
    """Width of a feed-forward layer by its gate: [F, D], or for stacked experts [E, D, F] or [E, F, D]."""
    if ".stacked." in name or name.startswith("stacked."):
        return gate[1] if gate[1] != hidden and gate[2] == hidden else gate[2]
    return gate[0]


def moe(view: View) -> BranchPart:
    stacked = "stacked.gate.weight" in view
    count, size, experts = _stack_shape(view) if stacked else _experts(view)
    view.measure("num_experts", count, "stacked.gate.weight" if stacked else "router.weight")
    key = "moe_intermediate_size" if view.facts.find("moe_intermediate_size") else "intermediate_size"
    _ffn_size(view, size, key, "stacked.gate.weight" if stacked else "experts.0.gate.weight")
    top_k = view.facts.default("experts_per_tok", min(2, count), "--set experts_per_tok=…")
    if top_k > count:
        raise UnsupportedModel(
            f"{view.facts.provenance['experts_per_tok']} says experts_per_tok = {top_k}, and there are only "
            f"{count} experts"
        )
    shared = view.shape("shared.gate.weight", 2)[0] if "shared.gate.weight" in view else None
    if view.facts.find("shared_expert_enabled") and not shared:
        view.shape("shared.gate.weight", 2)  # says what is missing
    if shared:  # the trainer adds it whatever the flag says
        view.facts.values["shared_expert_enabled"] = True
        view.facts.provenance["shared_expert_enabled"] = f"tensor {view.theirs('shared.gate.weight')}"
    tensors: Tensors = {
        "norm.weight": ((view.hidden,), True),
        "router.weight": ((count, view.hidden), True),
        **experts,
        **(_matrices("shared", shared, view.hidden) if shared else {}),
    }
    mixer = MoeSpec(count, top_k, MlpSpec(size), shared=MlpSpec(shared) if shared else None)
    return BranchPart(mixer, view.rms(), tensors)


def _matrices(leaf: str, size: int, hidden: int) -> Tensors:
    up, down = ((size, hidden), True), ((hidden, size), True)
    return {f"{leaf}.gate.weight": up, f"{leaf}.up.weight": up, f"{leaf}.down.weight": down}


def _experts(view: View) -> tuple[int, int, Tensors]:
    """(how many, their width, tensors). A hole in their numbers shows as missing tensors."""
    prefix = f"{view.prefixes[0]}.experts."
    numbers = {int(n.removeprefix(prefix).split(".")[0]) for n in view.shapes if n.startswith(prefix)}
    count = max(view.shape("router.weight", 2)[0], *(n + 1 for n in numbers), 0)
    size = view.shape("experts.0.gate.weight", 2)[0]
    tensors: Tensors = {}
    for e in range(count):
        tensors |= _matrices(f"experts.{e}", size, view.hidden)
    return count, size, tensors


def _stack_shape(view: View) -> tuple[int, int, Tensors]:
    """One tensor for all experts: [E, in, out], or [E, out, in] where the shapes leave no doubt."""
    count, a, b = view.shape("stacked.gate.weight", 3)
    size, as_linear = _size("stacked.gate.weight", (count, a, b), view.hidden), a != view.hidden
    up, down = ((count, view.hidden, size), True), ((count, size, view.hidden), True)
    up, down = (down, up) if as_linear else (up, down)
    return (count, size, {"stacked.gate.weight": up, "stacked.up.weight": up, "stacked.down.weight": down})
