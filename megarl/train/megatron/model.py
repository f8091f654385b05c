"""A Megatron-Core model of one rank from a ``ModelSpec`` and a layout.

Invariants:
1. The last stage returns hidden states after the final norm, or a critic's values; logits are never made here
   (``heads.py`` reads hidden states and the output matrix in chunks).
2. Weights are left unset by construction; ``initialize.py`` draws them by name, or a checkpoint fills them.
3. Everything a spec says reaches Megatron-Core or raises ModelError; nothing of it is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megarl.errors import ModelError
from megarl.models.spec import ModelSpec, RopeScaling
from megarl.parallel.grid import ParallelLayout
from megarl.parallel.groups import ParallelGroups
from megarl.platform.device import Device
from megarl.platform.packages import megatron_quiet
from megarl.train.megatron.attention import PlannedSequences
from megarl.train.megatron.balance import RoutedTokens
from megarl.train.megatron.experts import EXPERT_BIAS, expert_options, leave_counting_to_us, mark_experts
from megarl.train.megatron.latent import latent_options
from megarl.train.megatron.layers import decoder_spec
from megarl.weights.layout import check_divides

Head = Literal["lm", "value"]
Recompute = Literal["none", "selective", "full"]

# Constants of Megatron-Core's llama3 scaling, models/common/embeddings/rotary_pos_embedding.py:96-98.
_LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}


def build_model(
    spec: ModelSpec,
    groups: ParallelGroups,
    *,
    device: Device,
    dtype: torch.dtype,
    head: Head = "lm",
    recompute: Recompute = "none",
    options: Mapping[str, Any] | None = None,
) -> list[Chunk]:
    """This rank's model chunks, on the device, with unset weights (norms one, value head zero).

    Args:
        spec: sizes and options of the model.
        groups: groups of this rank; the layout is theirs.
        device: where it computes; decides between Megatron's local layers and Transformer Engine's.
        dtype: dtype of weights and activations, float32 or bfloat16. A value head is float32.
        head: ``lm`` for a policy, ``value`` for a critic.
        recompute: activation recompute: none, core attention only, or whole layers.
        options: further ones of Megatron-Core's TransformerConfig (``acceleration.py``).

    Raises:
        LayoutError: the model does not divide into the layout.
        ModelError: Megatron-Core cannot represent an option of the spec.
    """
    layout = groups.layout
    config = transformer_config(spec, layout, device=device, dtype=dtype, recompute=recompute, options=options)
    chunks = []
    for index in range(layout.vpp):
        layers = layout.layers_of_stage(spec.num_layers, groups.coordinate.pp, index)
        with megatron_quiet():
            decoder = decoder_spec(device.layer_implementation, spec, layers)
            chunk = Chunk(config, decoder, spec, groups, head=head, index=index)
        chunks.append(chunk.to(device.torch_device))
    return chunks


def named_parameters(chunks: Sequence[Chunk]) -> dict[str, Tensor]:
    """A rank's parameters by Megatron's name; with virtual stages a name starts with its chunk, ``model0.``."""
    return {
        (f"model{index}." if len(chunks) > 1 else "") + name: parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def named_weights(chunks: Sequence[Chunk]) -> dict[str, Tensor]:
    """The same, and the biases that choose experts, which are buffers: all that a checkpoint of the model holds."""
    biases = {
        (f"model{index}." if len(chunks) > 1 else "") + name: buffer
        for index, chunk in enumerate(chunks)
        for name, buffer in chunk.named_buffers()
        if name.endswith(EXPERT_BIAS)
    }
    return named_parameters(chunks) | biases


def transformer_config(
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    device: Device,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    options: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Megatron-Core's configuration of the model in the layout. Raises what ``build_model`` raises."""
    layout.check_split(spec.split_rows)
    check_divides(spec, layout)
    on_gpu = device.layer_implementation == "transformer_engine"
    _check_trained(spec, on_gpu=on_gpu)
    _check_rope(spec)
    if spec.mla is not None and not on_gpu:
        layout.check_split(spec.mla.split_rows)
    kind = TransformerConfig if spec.mla is None else MLATransformerConfig
    with megatron_quiet():
        return kind(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            ffn_hidden_size=spec.ffn_hidden_size,
            num_attention_heads=spec.num_heads,
            num_query_groups=spec.num_kv_heads,
            kv_channels=spec.head_dim,
            normalization="RMSNorm",
            layernorm_epsilon=spec.rms_norm_eps,
            qk_layernorm=spec.qk_norm or (on_gpu and spec.mla is not None),
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            add_qkv_bias=spec.qkv_bias,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            pipeline_dtype=dtype,
            init_method_std=spec.init_std,
            perform_initialization=False,
            use_cpu_initialization=not on_gpu,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            sequence_parallel=layout.sequence_parallel,
            num_layers_in_first_pipeline_stage=layout.first_stage_layers,
            num_layers_in_last_pipeline_stage=layout.last_stage_layers,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            pipeline_model_parallel_layout=layout.pipeline,
            # Packed microbatches differ in length, so stages tell each other what they send; with virtual stages
            # they are padded to one length instead (forward.py).
            variable_seq_lengths=layout.pp > 1 and layout.vpp == 1,
            # Of two stages each is the other's next and previous: batched messages would be taken for one another.
            overlap_p2p_comm=layout.vpp > 1,
            batch_p2p_comm=layout.vpp == 1,
            **expert_options(spec, layout, grouped=on_gpu),
            **({} if spec.mla is None else latent_options(spec, spec.mla)),
            # Losses are summed over microbatches and ranks and divided by counts of the global minibatch.
            calculate_per_token_loss=True,
            recompute_granularity=None if recompute == "none" else recompute,
            recompute_method="uniform" if recompute == "full" else None,
            recompute_num_layers=1 if recompute == "full" else None,
            attention_softmax_in_fp32=True,
            # Fused kernels that need CUDA, Apex or Transformer Engine, or compile.
            apply_rope_fusion=on_gpu and spec.mla is None,
            bias_activation_fusion=on_gpu,
            bias_dropout_fusion=on_gpu,
            masked_softmax_fusion=on_gpu,
            gradient_accumulation_fusion=False,
            persist_layer_norm=on_gpu,
            # Virtual stages free what they still send; gloo sends from that memory, NCCL's allocator keeps it.
            deallocate_pipeline_outputs=layout.pp > 1 and (on_gpu or layout.vpp == 1),
            batch_p2p_sync=on_gpu,
            **({} if options is None else options),
        )


def _check_trained(spec: ModelSpec, *, on_gpu: bool) -> None:
    """What the model asks for is what megarl trains, on such a device."""
    if spec.not_trained is not None:
        raise ModelError(f"megarl does not train {spec.not_trained} yet", where=spec.family)
    if on_gpu and spec.not_trained_on_gpu is not None:
        raise ModelError(
            f"megarl does not train {spec.not_trained_on_gpu} on GPU",
            where=spec.family,
            fix="train a model whose queries have a latent (DeepSeek-V3's form), or set cluster.device=cpu",
        )


def _check_rope(spec: ModelSpec) -> None:
    """Megatron-Core's llama3 rope scaling takes the factor and fixes the rest."""
    if not isinstance(spec.rope_scaling, RopeScaling):
        return
    for name, constant in _LLAMA3_CONSTANTS.items():
        if (value := getattr(spec.rope_scaling, name)) != constant:
            raise ModelError(
                f"rope scaling with {name}={value} cannot be represented: Megatron-Core fixes it at {constant}",
                where="rope_scaling",
            )


class Chunk(GPTModel):
    """The layers of one pipeline stage, or virtual stage, with the embedding on the first and a head on the last.

    ``forward(input_ids, position_ids, attention_mask=None, packed_seq_params=...)`` takes a pack as [1, N] token ids,
    positions from 0 in each sequence, and its ``PackedSeqParams`` (format thd); later stages take the hidden states
    from ``set_input_tensor``. Without ``packed_seq_params``, [B, S] whole sequences.

    Under context parallelism N counts this rank's tokens, ``packed_seq_params`` those of the whole pack.

    It returns, in Megatron-Core's order of dims:
        - before the last stage, hidden states [N, 1, H] (this rank's N / tp under sequence parallelism);
        - on the last stage of a policy, the same after the final norm;
        - on the last stage of a critic, values [N, 1, 1] float32, all N on every tensor-parallel rank.
    """

    def __init__(
        self,
        config: TransformerConfig,
        decoder: Any,
        spec: ModelSpec,
        groups: ParallelGroups,
        *,
        head: Head,
        index: int = 0,
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=decoder,
            vocab_size=groups.layout.padded_vocab_size(spec.vocab_size),
            max_sequence_length=spec.max_position,
            pre_process=groups.is_first_stage and index == 0,
            post_process=groups.is_last_stage and index == groups.layout.vpp - 1,
            vp_stage=index if groups.layout.vpp > 1 else None,
            parallel_output=True,
            share_embeddings_and_output_weights=spec.tied_embeddings and head == "lm",
            position_embedding_type="rope",
            rotary_percent=spec.rotary_fraction,
            rotary_base=spec.rope_theta,
            rope_scaling=isinstance(spec.rope_scaling, RopeScaling),
            rope_scaling_factor=spec.rope_scaling.factor if isinstance(spec.rope_scaling, RopeScaling) else 1.0,
            pg_collection=groups.megatron,
        )
        self.spec = spec
        self.groups = groups
        self.head = head
        _mark_shards(self)
        mark_experts(self)
        leave_counting_to_us(self)
        if head == "value" and self.post_process:
            self.output_layer = ValueHead(config, spec.hidden_size)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        routed: RoutedTokens | None = None,
        **options: Any,
    ) -> Tensor:
        """See the class; ``routed`` reaches the routers with ``packed_seq_params``, the way each layer is told."""
        if packed_seq_params is not None and self.config.use_cpu_initialization:
            cp = self.groups.cp
            packed_seq_params = PlannedSequences(
                packed_seq_params, position_ids.flatten(), cp_rank=cp.rank(), cp_size=cp.size()
            )
        if routed is not None:
            packed_seq_params.routed = routed  # type: ignore[union-attr]
        output: Tensor = super().forward(
            input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params, **options
        )
        return output

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Megatron-Core's, and one row of the rotary table for each token of a planned pack."""
        is_planned = isinstance(packed_seq_params, PlannedSequences)
        # Told of format thd, Megatron-Core leaves the table whole under context parallelism.
        told = packed_seq_params.packed if is_planned else packed_seq_params
        decoder_input, rotary, *rest = super()._preprocess(
            input_ids, position_ids, *args, packed_seq_params=told, **kwargs
        )
        # Latent attention has a table of its own.
        if is_planned and rotary is not None:
            rotary = rotary.index_select(0, position_ids.flatten())
        return (decoder_input, rotary, *rest)

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Hidden states as they are, or a critic's values; never logits."""
        if not self.post_process or self.head == "lm":
            return hidden_states
        values: Tensor = self.output_layer(hidden_states)
        return values

    def output_weight(self) -> Tensor:
        """This rank's rows of the output matrix [padded vocabulary / tp, H]; the embedding's where they are tied."""
        if self.share_embeddings_and_output_weights:
            weight: Tensor = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        return weight


def _mark_shards(chunk: torch.nn.Module) -> None:
    """Tell Megatron-Core which weights are shards: its gradient norm counts others on tensor-parallel rank 0 only.

    Megatron-Core marks a weight while it draws it (tensor_parallel/layers.py:170), which we leave out; Transformer
    Engine's layers mark their own.
    """
    for module in chunk.modules():
        if isinstance(module, RowParallelLinear):
            dim = 1
        elif isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dim = 0
        else:
            continue
        if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)


class ValueHead(MegatronModule):
    """``w . h`` in float32 with one row ``w`` [1, H], replicated over tensor-parallel ranks, zero at the start.

    It stands in the model's ``output_layer``, so that Megatron-Core's checkpoints find it there.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32))
        # Under sequence parallelism each rank sees its own tokens; Megatron-Core then sums the gradients.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N, 1, 1] float32 of hidden states [N, 1, H], or of this rank's [N / tp, 1, H]."""
        values: Tensor = torch.nn.functional.linear(hidden.float(), self.weight)
        if self.config.sequence_parallel:
            # Every rank computes the same loss from the gathered values, so gradients are split, not summed.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values
