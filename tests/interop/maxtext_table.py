"""docs/maxtext.md, made from the tables: `python -m tests.interop.maxtext_table --write docs/maxtext.md`."""

import sys
from pathlib import Path

from raggedmoe.interop.maxtext import GROUP_OF, TRANSLATED, defaults, known_maxtext_names, without_counterpart
from raggedmoe.models.sizes import FIELDS, OTHERS
from raggedmoe.train.settings.config import SETTINGS

# What a translated MoE setting is here, where its name does not say it.
HERE = {
    "num_experts": "E, the number of experts; with it and the other sizes a model of any size can be said",
    "num_experts_per_tok": "K",
    "base_moe_mlp_dim": "F, the width of an expert",
    "capacity_factor": "slots of each expert in each sequence, ⌈S·K/E⌉ · factor, given in the order of the tokens; "
    "with `sparse_matmul=false`",
    "ragged_buffer_factor": "rows of a receive buffer, as a multiple of an even share",
    "num_moe_token_chunks": "`token_chunks`",
    "num_moe_emb_chunks": "`width_chunks`",
    "load_balance_loss_weight": "the same loss: taken in each sequence, K times ours, and the mean over layers",
    "use_ring_of_experts": "`expert_strategy=ring`",
    "use_ragged_sort": "`ragged_gather=sparsecore,xla ragged_gather_reduce=sparsecore,xla`",
    "ragged_gather_fallback": "`ragged_gather.forward=xla ragged_gather_reduce.backward=xla`: the gather kernel, "
    "wherever it runs",
    "ragged_gather_reduce_fallback": "`ragged_gather_reduce.forward=xla ragged_gather.backward=xla`",
    "use_random_routing": "`routing=random`; each token's experts are drawn without replacement, which the run says",
    "interleave_moe_layer_step": "every so many layers one has experts",
    "quantization": "`fp8_full` is `quantization=fp8`, `int8` itself: of the experts alone; formats of 4 bits, "
    "Transformer Engine's and AMD's are refused with the nearest, `te_fp8_delayedscaling` with `quantization=fp8 "
    "quantization_history=1024`",
    "use_qwix_quantization": "nothing: the experts are quantised alike, for the layer's own kernels",
    **{
        f"{short}_quantization_calibration_method": f"`fixed,-a,a`: `{ours}`, a constant: a over the format's largest"
        for short, ours in (
            ("weight", "quantization_weight_scale"),
            ("act", "quantization_row_scale"),
            ("bwd", "quantization_cotangent_scale"),
        )
    },
    "norm_topk_prob": "a token's weights sum to one, scaled or not",
    "megablox": "`grouped_matmul=megablox,cpu,xla`: JAX's kernel where it runs; false: `grouped_matmul=xla`",
    "use_tokamax_gmm": "`grouped_matmul=tokamax,cpu,xla`, before megablox",
    "use_gmm_v2": "`grouped_matmul=gmm_v2,tokamax,cpu,xla`, before both",
    "sparse_matmul": "false: every expert on every token, or fixed slots with a capacity factor",
    "first_num_dense_layers": "that many layers have a dense MLP (`base_mlp_dim`)",
    "shared_experts": "experts that see every token",
    "routed_scaling_factor": "of a token's weights, in DeepSeek's models",
    "routed_score_func": "softmax, sigmoid or sqrtsoftplus",
    "routed_bias": "a bias that decides who is chosen in DeepSeek V3; in other models, one of the logits",
    "routed_bias_update_rate": "`bias_update_rate`",
    "mlp_bias": "experts have biases",
    "n_routing_groups": "groups of experts in DeepSeek V3; -1: none",
    "topk_routing_group": "groups that a token may use",
}


def status_of(name: str) -> str:
    """What is made of a setting: translated, no effect, or refused."""
    if name in TRANSLATED or name in GROUP_OF:
        return "translated"
    return without_counterpart()[name][0]


def page(moe_keys: list[str]) -> str:
    """The whole page; ``moe_keys`` are the settings of its table, in MaxText's order."""
    statuses = [status_of(name) for name in known_maxtext_names()]
    counts = {status: statuses.count(status) for status in ("translated", "no effect", "refused")}
    lines = [
        "# For users of MaxText",
        "",
        "Lines written for MaxText can be pasted after `raggedmoe train`, `plan`, `explain`, `compile` or `launch --",
        "train`: a `base.yml` (or any `*.yml` in its form) first, then `key=value`, `--key=value` or `--key value`.",
        "",
        f"{len(statuses)} of its settings are known (its `base.yml` of August 2026 and names of older lines): "
        f"{counts['translated']} are",
        f"translated or the same here, {counts['no effect']} change no result and have no effect, {counts['refused']} "
        "belong to features that do not exist",
        "here and are refused with what comes nearest. None fails at its default there. A setting without effect says",
        "so in the run's first lines; all refused ones stand in one error.",
        "",
        "What a file says gives way to what is typed. Without a file of that name, `base.yml` is MaxText's defaults as",
        "they were published; a model that is named brings its own sizes, as there. Every step's line begins with",
        "`completed step: N` (N counts from 1) and ends with `loss: …` where the output is not a terminal.",
        "",
        "## The MoE and quantisation settings",
        "",
        "| setting | default there | here | what it is, or why not |",
        "|---|---|---|---|",
    ]
    for name in moe_keys:
        status = status_of(name)
        text = HERE[name] if status == "translated" else without_counterpart()[name][1]
        default = defaults()[name]
        lines.append(f"| `{name}` | {f'`{default}`' if default else 'none'} | {status} | {text} |")
    sizes = ", ".join(f"`{name}`" for name in SETTINGS if name in (*FIELDS, *OTHERS) and name != "num_layers")
    lines += ["", "## Sizes", "", f"`num_layers` (`base_num_decoder_layers`), {sizes}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    from tests.interop.test_maxtext import PINNED

    if len(sys.argv) != 3 or sys.argv[1] != "--write":
        sys.exit("expected --write FILE")
    Path(sys.argv[2]).write_text(page(list(PINNED)))
