"""Agent programs that call the model over HTTP."""
