"""The command `agentkv`: serve a model, and look at a server that runs."""
