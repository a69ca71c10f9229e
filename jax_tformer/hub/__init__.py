"""Opens folders that Hugging Face's `save_pretrained` wrote, and writes folders that its `from_pretrained` opens."""
