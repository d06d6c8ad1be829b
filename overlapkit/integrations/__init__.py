"""The files that work with torch, megatron-core or nemo-run; none of them is imported with overlapkit."""
