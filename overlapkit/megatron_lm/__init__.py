"""Megatron-LM's own files: launch scripts, argument lists and the flags in them."""
