"""HTTP endpoint for agents outside the run: formats of OpenAI, Anthropic and vLLM over one protocol of sessions."""
