"""Models: one file per Hugging Face model_type."""
