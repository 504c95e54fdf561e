"""A LLaVA-OneVision-1.5 style vision-language model trained on Megatron core, on CPU or GPU."""
