"""List the ops whose kernels exist on accelerators only. Their rules follow the schema, without tests on pieces."""

BY_SCHEMA = frozenset({
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_fused_attention_overrideable_backward",
    "_fused_rms_norm_backward", "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl",
})  # fmt: skip
