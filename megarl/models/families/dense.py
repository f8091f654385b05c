"""The weight rules that Llama-like decoders share: embedding, attention by heads, dense feed-forward part, head.

Names were read from megatron-core 0.16.1 and 0.19.2 and from checkpoints that transformers 5.19 saves.
"""

from __future__ import annotations

from megarl.models.rules import VALUE_HEAD, Dropped, GroupedQKV, Replicate, Rule, Split, Stack, Tensor

M, H = "decoder.layers.{layer}.", "model.layers.{layer}."

EMBEDDING = Tensor("model.embed_tokens.weight", ("vocab", "hidden"))

OUTSIDE_LAYERS: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", (EMBEDDING,), Split(0, padded=True), "first"),
    Rule("decoder.final_layernorm.weight", (Tensor("model.norm.weight", ("hidden",)),), Replicate(), "last"),
    Rule(
        "output_layer.weight",
        (Tensor("lm_head.weight", ("vocab", "hidden")),),
        Split(0, padded=True),
        "last",
        when=("lm", "untied"),
    ),
    # With one stage a tied model's head is the embedding itself; with several, the last stage keeps a copy of it.
    Rule(
        "output_layer.weight",
        (EMBEDDING,),
        Split(0, padded=True),
        "last",
        when=("lm", "tied", "pipelined"),
        is_copy=True,
    ),
    Rule("output_layer.weight", (Tensor(VALUE_HEAD, ("one", "hidden")),), Replicate(), "last", when=("value",)),
)

ATTENTION: tuple[Rule, ...] = (
    Rule(
        M + "input_layernorm.weight",
        (Tensor(H + "input_layernorm.weight", ("hidden",)),),
        Replicate(),
        "layer",
        te=M + "self_attention.linear_qkv.layer_norm_weight",
    ),
    Rule(
        M + "self_attention.linear_qkv.weight",
        (
            Tensor(H + "self_attn.q_proj.weight", ("query", "hidden")),
            Tensor(H + "self_attn.k_proj.weight", ("kv", "hidden")),
            Tensor(H + "self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        GroupedQKV(),
        "layer",
    ),
    Rule(
        M + "self_attention.linear_qkv.bias",
        (
            Tensor(H + "self_attn.q_proj.bias", ("query",)),
            Tensor(H + "self_attn.k_proj.bias", ("kv",)),
            Tensor(H + "self_attn.v_proj.bias", ("kv",)),
        ),
        GroupedQKV(),
        "layer",
        when=("qkv_bias",),
    ),
    Rule(
        M + "self_attention.q_layernorm.weight",
        (Tensor(H + "self_attn.q_norm.weight", ("head",)),),
        Replicate(),
        "layer",
        when=("qk_norm",),
    ),
    Rule(
        M + "self_attention.k_layernorm.weight",
        (Tensor(H + "self_attn.k_norm.weight", ("head",)),),
        Replicate(),
        "layer",
        when=("qk_norm",),
    ),
    Rule(
        M + "self_attention.linear_proj.weight",
        (Tensor(H + "self_attn.o_proj.weight", ("hidden", "query")),),
        Split(1),
        "layer",
    ),
)

DENSE_MLP: tuple[Rule, ...] = (
    Rule(
        M + "pre_mlp_layernorm.weight",
        (Tensor(H + "post_attention_layernorm.weight", ("hidden",)),),
        Replicate(),
        "layer",
        te=M + "mlp.linear_fc1.layer_norm_weight",
        when=("dense_layer",),
    ),
    Rule(
        M + "mlp.linear_fc1.weight",
        (
            Tensor(H + "mlp.gate_proj.weight", ("ffn", "hidden")),
            Tensor(H + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        Stack(),
        "layer",
        when=("dense_layer",),
    ),
    Rule(
        M + "mlp.linear_fc2.weight",
        (Tensor(H + "mlp.down_proj.weight", ("hidden", "ffn")),),
        Split(1),
        "layer",
        when=("dense_layer",),
    ),
)

DENSE_DECODER = OUTSIDE_LAYERS + ATTENTION + DENSE_MLP

DENSE_DROPPED: tuple[Dropped, ...] = (
    Dropped(r"(.*\.)?rotary_emb\.inv_freq", "recomputed from rope_theta"),
    Dropped(r"lm_head\.weight", "the configuration ties it to the embedding", when=("tied", "lm")),
    Dropped(r"lm_head\.weight", "a value model has no language-model head", when=("value",)),
    Dropped(r"score\.weight", "a language model has no value head", when=("lm",)),
)
