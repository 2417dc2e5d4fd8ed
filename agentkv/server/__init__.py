"""The service: translates between the wire and the engine, and never decides."""
