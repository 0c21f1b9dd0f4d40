"""A tiny random model of every architecture that the installed mlx-lm has.

``build(name)`` gives a model of two to five layers, at most 64 wide in nearly all of them, with
weights drawn so that attention isn't flat. Hybrids hold at least one layer of each kind.
``architectures()`` scans the installed mlx-lm, so that an architecture which a later mlx-lm adds
shows up as one that ``CONFIGS`` lacks.
"""

# ruff: noqa: C408 (keyword arguments keep the tables below short)

import functools
import importlib
import math
import pkgutil
import sys
from copy import deepcopy
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_map_with_path, tree_unflatten
from mlx_lm.models.bitlinear_layers import BitLinear
from mlx_lm.models.switch_layers import SwitchLinear

VOCAB = 128
WINDOW = 8  # of every sliding-window layer: shorter than the prompts that tests use

# ModelArgs.from_dict drops the keys that an architecture doesn't know, so that one dict serves
# most. What is optional and changes the architecture (layer types, biases) isn't in it.
BASE = dict(
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    layer_norm_eps=1e-5,
    layer_norm_epsilon=1e-5,
    norm_eps=1e-5,
    rope_theta=10000.0,
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
)
# Routed experts, under the names that the architectures give them.
MOE = dict(
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    num_experts_per_token=2,
    num_shared_experts=1,
    n_shared_experts=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    n_group=1,
    topk_group=1,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
)
# Multi-head latent attention: one latent head of kv_lora_rank is what the cache holds.
MLA = MOE | dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
DSA = MLA | dict(index_head_dim=16, index_n_heads=2, index_topk=4)  # and a sparse indexer

SLIDING_FULL = ["sliding_attention", "full_attention"]
LINEAR_FULL = ["linear_attention", "full_attention"]
SWA = dict(
    sliding_window=WINDOW,
    sliding_window_pattern=2,
    num_hidden_layers=4,
    layer_types=SLIDING_FULL * 2,
)
GRANITE = dict(
    logits_scaling=1.0,
    attention_multiplier=0.25,
    embedding_multiplier=1.0,
    residual_multiplier=1.0,
)
MAMBA2 = dict(
    mamba_n_heads=4,
    mamba_num_heads=4,
    mamba_d_head=16,
    mamba_head_dim=16,
    mamba_d_ssm=64,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_n_groups=1,
    mamba_proj_bias=False,
    mamba_conv_bias=True,
)
DELTA_NET = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    full_attention_interval=2,
    partial_rotary_factor=0.5,
    rope_parameters=dict(type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
)
KDA = dict(num_heads=4, head_dim=16, kda_layers=[1], short_conv_kernel_size=4)
LFM2 = dict(
    num_hidden_layers=3,
    layer_types=["conv", "full_attention", "conv"],
    conv_bias=False,
    conv_L_cache=3,
    block_dim=64,
    block_ff_dim=96,
    block_multiple_of=4,
    block_ffn_dim_multiplier=1.0,
    block_auto_adjust_ff_dim=True,
    num_dense_layers=1,
    use_expert_bias=True,
)
LONGCAT = MLA | dict(
    num_layers=2,
    attention_method="MLA",
    zero_expert_type="identity",
    zero_expert_num=2,
    ffn_hidden_size=96,
    expert_ffn_hidden_size=32,
    moe_topk=2,
    mla_scale_q_lora=True,
    mla_scale_kv_lora=True,
    ngram_vocab_size_ratio=2,
    emb_neighbor_num=3,
    emb_split_num=2,
)
GPT = dict(n_embd=64, n_head=4, n_layer=2, n_inner=96, n_ctx=4096, n_positions=4096)
GEMMA = dict(query_pre_attn_scalar=16, final_logit_softcapping=30.0)
GEMMA3N = (
    BASE
    | SWA
    | dict(
        model_type="gemma3n",
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=16,
        rope_local_base_freq=10000.0,
        final_logit_softcapping=30.0,
        activation_sparsity_pattern=[0.5] * 4,
        altup_num_inputs=2,
        altup_coef_clip=1.0,
        altup_correct_scale=True,
        altup_active_idx=0,
        laurel_rank=8,
    )
)
GEMMA4 = SWA | dict(
    global_head_dim=32,
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=16,
    num_kv_shared_layers=2,
    num_key_value_heads=1,
)
LLAMA4 = MOE | dict(
    model_type="llama4_text",
    num_hidden_layers=4,  # the fourth is full attention without RoPE
    attention_chunk_size=WINDOW,
    interleave_moe_layer_step=2,
    intermediate_size_mlp=96,
    num_experts_per_tok=1,
    rope_scaling=None,
    use_qk_norm=True,
    no_rope_layers=[1, 1, 1, 0],
    # Published models scale queries from position 8,192 on: early enough here to be seen.
    floor_scale=4,
)
YARN = dict(
    rope_type="yarn",
    type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=1024,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)


def _nested(inner: str, **own) -> dict:
    """The config of a model that wraps another architecture's text model."""
    text = own.pop("text", {})
    return dict(text_config=CONFIGS[inner] | text, vocab_size=VOCAB) | own


def _hadamard_pack() -> dict:
    # Packed weights come in groups of 128, and the smallest rotated block is 512.
    path = "model.layers.{}.mlp.down_proj"
    record = dict(embedding=False, dtype="float16", block=512)
    return dict(
        text_config=CONFIGS["qwen3_5"] | dict(intermediate_size=512),
        schema_version=1,
        tensor_namespace="mlx-lm-text",
        quantization=dict(bits=2, group_size=128, mode="affine"),
        modules=[record | dict(path=path.format(i)) for i in range(2)],
    )


# Each is what differs from BASE, which is merged in below.
CONFIGS: dict[str, dict] = {
    "Klear": MOE | dict(decoder_sparse_step=2, mlp_only_layers=[0]),
    "afm7": dict(num_layers=4, num_kv_reuse_layers=2, hidden_dim=64, num_heads=4, num_kv_heads=2),
    "afmoe": MOE | SWA | dict(num_dense_layers=1),
    "apertus": dict(post_norm=True, qk_norm=True),
    "baichuan_m1": dict(sliding_window=WINDOW, sliding_window_layers=[0], conv_window=2),
    "bailing_hybrid": MLA | dict(layer_group_size=2, group_norm_size=2, num_hidden_layers=4),
    "bailing_moe": MOE,
    "bailing_moe_linear": MOE | dict(layer_group_size=2, group_norm_size=2, num_hidden_layers=4),
    "bailing_moe_v3": MLA
    | dict(layer_group_size=2, num_hidden_layers=4, moe_shared_expert_intermediate_size=32),
    "bitnet": {},
    "cohere": {},
    "cohere2": SWA,
    "dbrx": dict(
        d_model=64,
        n_layers=2,
        n_heads=4,
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
    ),
    "deepseek": MOE,
    "deepseek_v2": MLA | dict(rope_scaling=YARN, topk_method="greedy"),
    "deepseek_v3": MLA | dict(rope_scaling=YARN, n_group=2),
    "deepseek_v32": DSA | dict(rope_scaling=YARN),
    # Window only, compressing by four, and the same with the first one's compressed rows.
    "deepseek_v41": MOE
    | dict(
        num_hidden_layers=3,
        head_dim=32,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        o_groups=2,
        o_lora_rank=16,
        scoring_func="sqrtsoftplus",
        hc_mult=2,
        sliding_window=WINDOW,
        compress_ratios=[0, 4, 4],
        kv_source_layer_ids=[1],
        index_source_layer_ids=[1],
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
    ),
    "dots1": MOE,
    "ernie4_5": dict(use_bias=False),
    "ernie4_5_moe": dict(use_bias=False, moe_num_experts=4, moe_k=2, moe_intermediate_size=32)
    | dict(moe_layer_start_index=1, moe_num_shared_experts=1),
    "exaone": dict(num_layers=2),
    "exaone4": SWA | dict(rope_scaling=None, sliding_window_pattern="LG"),
    "exaone_moe": MOE | SWA | dict(is_moe_layer=[False, True] * 2),
    "falcon_h1": MAMBA2,
    "gear": SWA
    | dict(
        num_hidden_layers=3, layer_types=["conv_mixer", *SLIDING_FULL], query_pre_attn_scalar=16.0
    ),
    "gemma": {},
    "gemma2": GEMMA | dict(attn_logit_softcapping=50.0),
    "gemma3_text": SWA | GEMMA,
    "gemma3n": dict(text_config=GEMMA3N),
    "gemma4_text": GEMMA4,
    "glm": {},
    "glm4": dict(partial_rotary_factor=0.5),
    "glm4_moe": MOE | dict(use_qk_norm=True, partial_rotary_factor=0.5, rope_scaling=None),
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": DSA | dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    "gpt2": GPT | dict(num_key_value_heads=None),
    "gpt_bigcode": GPT | dict(num_key_value_heads=1),
    "gpt_neox": dict(num_key_value_heads=None, rotary_emb_base=10000, rotary_pct=0.25),
    "gpt_oss": MOE | SWA,
    "gptj": GPT | dict(rotary_dim=8),
    "granite": GRANITE,
    "granitemoe": GRANITE | MOE,
    "granitemoehybrid": GRANITE
    | MOE
    | MAMBA2
    | dict(shared_intermediate_size=32, layer_types=["mamba", "attention"]),
    "helium": {},
    # Cross-layer attention: the odd layers attend to the even ones' keys and values.
    "hunyuan": MOE
    | dict(use_cla=True, cla_share_factor=2, num_hidden_layers=4, use_qk_norm=True, moe_topk=2)
    | dict(num_shared_expert=1, use_mixed_mlp_moe=True, intermediate_size=32)
    | dict(rope_scaling=dict(alpha=1000.0, factor=1.0, type="dynamic")),
    "hunyuan_v1_dense": dict(rope_scaling=dict(alpha=1000.0, factor=1.0, type="dynamic")),
    "internlm2": dict(bias=False),
    "internlm3": {},
    "iquestloopcoder": dict(loop_window_size=WINDOW),
    "jamba": MOE
    | dict(attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2)
    | dict(mamba_d_conv=4, mamba_d_state=16, mamba_expand=2),
    "kimi_k3": MLA
    | dict(linear_attn_config=KDA, attn_res_block_size=2, mla_use_output_gate=True)
    | dict(num_hidden_layers=3),
    "kimi_linear": MLA | dict(linear_attn_config=KDA, model_max_length=4096),
    "laguna": MOE
    | SWA
    | dict(num_attention_heads_per_layer=[4, 2, 4, 2], moe_router_score_func="sqrtsoftplus")
    | dict(
        rope_parameters=dict(
            full_attention=YARN | dict(partial_rotary_factor=0.5),
            sliding_attention=dict(rope_type="default", rope_theta=10000.0),
        )
    ),
    "lfm2": LFM2,
    "lfm2_moe": LFM2 | MOE,
    "lille-130m": GPT | dict(block_size=4096, n_kv_heads=2),
    "llama": {},
    "llama4": dict(text_config=BASE | LLAMA4),
    "llama4_text": LLAMA4,
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT,
    "mamba": dict(state_size=16, conv_kernel=4, use_bias=False, use_conv_bias=True)
    | dict(time_step_rank=4, intermediate_size=128),
    "mamba2": dict(num_heads=4, state_size=16, conv_kernel=4, n_groups=1, use_bias=False)
    | dict(use_conv_bias=True, time_step_limit=(0.001, 100.0), time_step_rank=4)
    | dict(intermediate_size=64),
    "mellum": MOE
    | SWA
    | dict(rope_parameters={t: dict(rope_type="default", rope_theta=1e4) for t in SLIDING_FULL}),
    "mimo": {},
    "mimo_v2_flash": MOE
    | dict(num_hidden_layers=4, hybrid_layer_pattern=[0, 1] * 2, moe_layer_freq=[0, 1] * 2)
    | dict(add_swa_attention_sink_bias=True, add_full_attention_sink_bias=True)
    | dict(sliding_window_size=WINDOW, swa_rope_theta=10000.0, partial_rotary_factor=0.5)
    | dict(swa_num_attention_heads=4, swa_num_key_value_heads=1, swa_head_dim=32)
    | dict(head_dim=32, v_head_dim=16, swa_v_head_dim=16, layernorm_epsilon=1e-5, n_group=2),
    "minicpm": dict(dim_model_base=64, scale_depth=1.4, scale_emb=1.0),
    "minicpm3": MLA
    | dict(dim_model_base=64, scale_depth=1.4, scale_emb=1.0)
    # Its LongRoPE has one factor for each pair of rotated dimensions.
    | dict(
        rope_scaling=dict(
            type="longrope",
            original_max_position_embeddings=1024,
            short_factor=[1.0] * 4,
            long_factor=[1.0] * 4,
        )
    ),
    "minimax": MOE | dict(shared_intermediate_size=32, rotary_dim=8),
    "ministral3": SWA | dict(rope_parameters=YARN),
    "mistral4": MLA | dict(rope_parameters=YARN),
    "mixtral": MOE,
    "muse_glimmer": SWA,
    "nanbeige": dict(num_loops=2),
    "nanochat": {},
    "nemotron": dict(hidden_act="relu2"),
    # A layer of each kind: attention, none, linear in its place, attention with other heads.
    "nemotron-nas": dict(
        num_hidden_layers=4,
        block_configs=[
            dict(attention=dict(n_heads_in_group=2), ffn=dict(ffn_mult=1.0)),
            dict(attention=dict(no_op=True), ffn=dict(ffn_mult=1.0)),
            dict(attention=dict(replace_with_linear=True), ffn=dict(replace_with_linear=True)),
            dict(attention=dict(n_heads_in_group=4), ffn=dict(no_op=True)),
        ],
    ),
    "nemotron_h": MOE
    | MAMBA2
    | dict(hybrid_override_pattern=list("M*-E"), ssm_state_size=16, conv_kernel=4, n_groups=1)
    | dict(use_bias=False, use_conv_bias=True, moe_shared_expert_intermediate_size=32),
    "olmo": dict(d_model=64, n_layers=2, n_heads=4, mlp_hidden_size=96, embedding_size=VOCAB),
    "olmo2": {},
    "olmo3": SWA,
    "olmo_hybrid": DELTA_NET | dict(linear_allow_neg_eigval=True, layer_types=LINEAR_FULL),
    "olmoe": MOE,
    "openelm": dict(num_transformer_layers=2, model_dim=64, ffn_dim_divisor=32)
    | dict(num_query_heads=[4, 8], num_kv_heads=[1, 2], ffn_multipliers=[1.0, 1.5]),
    "phi": dict(partial_rotary_factor=0.5),
    "phi3": {},
    # Sparse blocks in the first layer of each pair.
    "phi3small": dict(dense_attention_every_n_layers=2, ff_intermediate_size=96, gegelu_limit=20.0)
    | dict(blocksparse_block_size=32, blocksparse_num_local_blocks=2, blocksparse_vert_stride=2)
    | dict(mup_attn_multiplier=4.0, mup_width_multiplier=1.0, mup_embedding_multiplier=1.0),
    "phimoe": MOE
    | dict(
        rope_scaling=dict(
            type="longrope",
            short_factor=[1.0] * 8,
            long_factor=[2.0] * 8,
            long_mscale=1.2,
            short_mscale=1.2,
        ),
    ),
    "phixtral": MOE | dict(num_vocab=VOCAB, model_dim=64, num_heads=4, num_layers=2, rotary_dim=8),
    "plamo": dict(n_shared_head=2),
    "plamo2": MAMBA2 | dict(hidden_size_per_head=16, mamba_step=2, num_hidden_layers=2),
    "plamo3": SWA,
    "qwen": dict(kv_channels=16),
    "qwen2": {},
    "qwen2_moe": MOE,
    "qwen3": {},
    "qwen3_5": DELTA_NET,
    "qwen3_moe": MOE,
    "qwen3_next": DELTA_NET | MOE,
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], attention_window_size=WINDOW)
    | dict(conv1d_width=4, logits_soft_cap=30.0, num_key_value_heads=1),
    "rwkv7": dict(a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8, decay_low_rank_dim=8),
    "seed_oss": {},
    "smollm3": dict(no_rope_layer_interval=2),
    "solar_open": MOE | dict(partial_rotary_factor=1.0),
    "spark2_5": SWA | dict(rope_parameters={t: dict(rope_theta=10000.0) for t in SLIDING_FULL}),
    "stablelm": dict(use_qkv_bias=False, partial_rotary_factor=0.5),
    "starcoder2": dict(norm_epsilon=1e-5),
    "step3p5": SWA
    | dict(num_attention_groups=2, moe_num_experts=4, moe_top_k=2, moe_intermediate_size=32)
    | dict(share_expert_dim=32, moe_layers_enum="1,3")
    | dict(attention_other_setting=dict(num_attention_heads=8, num_attention_groups=4)),
    "talkie": {},
    "telechat3": {},
    "youtu_llm": MLA,
}
# One dense layer, and one in which an indexer picks the blocks of keys to attend to.
MINIMAX_M3 = MOE | dict(
    dense_intermediate_size=96,
    shared_intermediate_size=32,
    layer_types=["full_attention", "sparse"],
    mlp_layer_types=["dense", "sparse"],
    index_n_heads=2,
    index_head_dim=16,
    index_block_size=4,
    index_topk_blocks=2,
)
MUSE_SPARK = (
    SWA
    | MOE
    | dict(
        post_norm_eps=1e-8,
        rope_parameters=dict(rope_theta=10000.0),
        layer_rope_theta=[10000.0, 0.0] * 2,
        final_logit_softcapping=20.0,
        output_multiplier=1.0,
        moe_hidden_size=32,
        num_shared_experts=0,
    )
)

CONFIGS = {name: BASE | dict(model_type=name) | own for name, own in CONFIGS.items()}
CONFIGS |= {
    "gemma3": _nested("gemma3_text"),
    "gemma4": _nested("gemma4_text"),
    "kimi_k25": _nested("deepseek_v3"),
    "kimi_vl": _nested("deepseek_v3"),
    "lfm2-vl": _nested("lfm2"),
    "minimax_m3_vl": dict(text_config=BASE | MINIMAX_M3),
    # Its wrapper gives every layer a plain KVCache, even to a sliding layer: none of those here.
    "mistral3": _nested("ministral3", text=dict(layer_types=None, sliding_window=None)),
    "muse_spark": dict(text_config=BASE | MUSE_SPARK),
    "pixtral": _nested("llama"),
    "prism_hadamard_qwen35": _hadamard_pack(),
    "qwen2_vl": _nested("qwen2"),
    "qwen3_5_moe": _nested("qwen3_5", text=MOE),
    "qwen3_vl": _nested("qwen3"),
    "qwen3_vl_moe": _nested("qwen3_moe"),
}
CONFIGS = {name: dict(model_type=name) | CONFIGS[name] for name in sorted(CONFIGS)}

# Architectures that can't run a prompt, tiny or not, and why.
UNBUILDABLE: dict[str, str] = {
    "olmo": "mlx-lm's own code adds the mask to the scores even where the mask is the name "
    "'causal', so that every prompt of more than one token fails",
}
if not mx.metal.is_available():
    UNBUILDABLE["muse_spark"] = "six of its steps exist only as Metal kernels, without a fallback"

# Their norms multiply by 1 + weight, but start with a weight of one: sharper than any real model.
ONE_PLUS = {
    f"mlx_lm.models.{name}"
    for name in ("gemma", "gemma2", "gemma3_text", "minimax_m3_vl", "nemotron", "recurrent_gemma")
}

if mx.default_device() == mx.cpu:
    # Compiling calls the C++ compiler there: seconds for each of some hundred small functions.
    mx.disable_compile()


def _import(name: str) -> ModuleType:
    # mlx-lm's olmo ends the process where this package, of which it uses nothing, is missing.
    if name == "olmo":
        sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))
    return importlib.import_module(f"mlx_lm.models.{name}")


@functools.cache
def _scan() -> tuple[str, ...]:
    found = []
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        arch = _import(module.name)
        if hasattr(arch, "Model") and hasattr(arch, "ModelArgs"):
            found.append(module.name)
    return tuple(sorted(found))


def architectures() -> list[str]:
    """The names of the installed mlx-lm's model files."""
    return list(_scan())


def build(name: str, dtype: mx.Dtype = mx.float32, seed: int = 0, **changes) -> nn.Module:
    """A tiny random model of the architecture ``name``, the same for the same seed.

    ``changes`` replace values of its config (in the text model's, where there is one).
    """
    arch = _import(name)
    config = deepcopy(CONFIGS[name])  # some ModelArgs write into the dicts that they're given
    config.get("text_config", config).update(changes)
    mx.random.seed(seed)
    model = arch.Model(arch.ModelArgs.from_dict(config))
    _adapt(model)
    keep_dtype = getattr(model, "cast_predicate", lambda path: True)

    def draw(path: str, old: mx.array) -> mx.array:
        new = _redraw(path, old)
        castable = mx.issubdtype(old.dtype, mx.floating) and keep_dtype(path)
        return new.astype(dtype if castable else old.dtype)

    model.update(tree_map_with_path(draw, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _redraw(path: str, old: mx.array) -> mx.array:
    name = path.rsplit(".", 1)[-1]
    if old.dtype == mx.uint32:  # packed weights
        return mx.random.randint(0, 2**31 - 1, old.shape).astype(mx.uint32)
    if name == "signs":
        return mx.where(mx.random.uniform(shape=old.shape) < 0.5, -1.0, 1.0)
    if not mx.issubdtype(old.dtype, mx.floating):
        return old
    noise = mx.random.normal(old.shape)
    if "sink" in name or name in ("conv_k", "conv_v"):  # of baichuan_m1, and zero at first
        return noise
    if name == "scales":
        return 0.1 * (1 + 0.1 * noise)
    if name in ("weight", "fn") and old.ndim > 1:
        fan_in = math.prod(old.shape[1:]) if "conv" in path else old.shape[-1]
        # A little more than unit variance, so that scores spread and attention is uneven.
        return noise * 1.4 * fan_in**-0.5
    # Norms, biases, decays: what the architecture starts with, made uneven.
    return old + 0.1 * noise


class _WideSwitchLinear(SwitchLinear):
    """Experts for the CPU, whose gather_mm knows float32 only."""

    def __call__(self, x, *args, **kwargs):
        return super().__call__(x.astype(mx.float32), *args, **kwargs).astype(x.dtype)


def _adapt(model: nn.Module) -> None:
    """Mend what keeps a model from running tiny, or on this device. Attention isn't touched."""
    if model.model_type == "phi3small":  # would write beyond the end of a small vocabulary
        model._dummy_tokenizer_ids = mx.array([], mx.int32)
    dense = []
    for path, module in model.named_modules():
        if type(module).__module__ in ONE_PLUS and "Norm" in type(module).__name__:
            module.weight = mx.zeros_like(module.weight)
        if isinstance(module, BitLinear) and not mx.metal.is_available():  # Metal's kernel only
            bias = module.bias is not None
            dense.append((path, nn.Linear(module.in_features, module.out_features, bias=bias)))
        elif type(module) is SwitchLinear and mx.default_device() == mx.cpu:
            module.__class__ = _WideSwitchLinear
    if dense:
        model.update_modules(tree_unflatten(dense))
