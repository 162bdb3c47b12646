"""Diffusion models of `diffusers`, which calls `scaled_dot_product_attention` itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .entry import BATCH, Case, Entry, spread

TEXT_LENGTH, TEXT_WIDTH = 77, 64
HEADS = 2


def _unet() -> Case:
    """SD 1.5's widest blocks, one down and one up: each attends to itself and to the text."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        block_out_channels=(40 * HEADS,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        mid_block_type=None,
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=HEADS,  # by that name SD 1.5 gives the number of heads
        norm_num_groups=16,
        sample_size=16,
    )
    return Case(
        spread(model),
        {
            "sample": torch.randn(BATCH, 4, 16, 16),
            "timestep": torch.tensor([10.0, 500.0]),
            "encoder_hidden_states": torch.randn(BATCH, TEXT_LENGTH, TEXT_WIDTH),
            "return_dict": False,
        },
    )


def _flux() -> Case:
    """One block of each kind: text and picture side by side, and joined."""
    from diffusers import FluxTransformer2DModel

    side = 16
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=128,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
    )
    rows = torch.arange(float(side))
    grid = torch.cartesian_prod(torch.zeros(1), rows, rows)
    return Case(
        spread(model),
        {
            "hidden_states": torch.randn(BATCH, side * side, 16),
            "encoder_hidden_states": torch.randn(BATCH, TEXT_LENGTH, TEXT_WIDTH),
            "pooled_projections": torch.randn(BATCH, TEXT_WIDTH),
            # A thousand times these is exact in bfloat16, which Flux computes it in.
            "timestep": torch.tensor([0.25, 0.5]),
            "guidance": torch.tensor([4.0, 4.0]),
            "img_ids": grid,
            "txt_ids": torch.zeros(TEXT_LENGTH, 3),
            "return_dict": False,
        },
    )


def _sd3() -> Case:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=32,
        num_layers=2,
        attention_head_dim=64,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=64 * HEADS,
        pooled_projection_dim=TEXT_WIDTH,
        pos_embed_max_size=16,
    )
    return Case(
        spread(model),
        {
            "hidden_states": torch.randn(BATCH, 16, 32, 32),
            "encoder_hidden_states": torch.randn(BATCH, TEXT_LENGTH, TEXT_WIDTH),
            "pooled_projections": torch.randn(BATCH, TEXT_WIDTH),
            "timestep": torch.tensor([10.0, 500.0]),
            "return_dict": False,
        },
    )


def _wan() -> Case:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=128,
        text_dim=TEXT_WIDTH,
        ffn_dim=256,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return Case(
        spread(model),
        {
            "hidden_states": torch.randn(BATCH, 16, 3, 16, 16),
            "timestep": torch.tensor([10, 500]),
            "encoder_hidden_states": torch.randn(BATCH, TEXT_LENGTH, TEXT_WIDTH),
            "return_dict": False,
        },
    )


# (name, sites of one forward, maker)
_MODELS: tuple[tuple[str, int, Callable[[], Case]], ...] = (
    ("SD 1.5 UNet", 6, _unet),  # one transformer block down and two up
    ("Flux", 2, _flux),
    ("SD3", 2, _sd3),
    ("Wan", 4, _wan),  # to itself and to the text
)


def entries() -> list[Entry]:
    return [
        Entry(name, "diffusers", "plain", sites, make, requires="diffusers")
        for name, sites, make in _MODELS
    ]
