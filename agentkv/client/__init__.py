"""The SDK: contexts of a remote server as Python objects. It needs only the wire, no torch."""
