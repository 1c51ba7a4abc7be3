"""Settings of small encoders."""

# DeBERTa-v2 with the options of its xxlarge model.
RELATIVE = {
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "conv_kernel_size": 3,
    "conv_act": "gelu",
}
