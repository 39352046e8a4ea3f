"""OpenAI's HTTP API over the engine, and what is served beside it: health, metrics, a chat page."""
