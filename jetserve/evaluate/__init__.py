"""How good a model is: perplexity and divergence of a text, tasks of lm-eval, and several models side by side."""
